"""The passes: verbs that turn one value of the IR into the next, each with a verifier.

    validate    raw spec -> Spec                   SpecError holds every mistake
    place       Spec -> PageRecord                 kvgen.ir.verify.verify_record
    address     Plane -> Address                   verify_address.verify_address
    simplify    Address -> Address (in address)    the same proof, by exhaustion
    plan_*      op + Spec + Schedule -> KernelPlan UnsupportedError before any compile
    render      KernelPlan -> source               verify_address.verify_source
    compile     source -> binary                   kvgen.backends, content-addressed, checked when loaded
    inspect     binary -> faults                   inspect.verify_binary

A value goes down this list once; no pass looks back up.
"""
