"""The Triton tool chain: compile without a GPU, judge the binary, run under the interpreter.

Nothing here imports triton or torch. Both live in worker processes (``worker.py``), because the
interpreter patches the language module and so poisons the compiler in the same process, and because
a compiler that hangs or aborts must cost one candidate and not the caller.

- ``source``      what a kernel is before it is compiled: text, signature, constants, options
- ``arch``        the GPU architectures the tool chain can name
- ``compile``     a pool of compile workers and its outcomes
- ``store``       the content-addressed folder of compiled kernels
- ``inspection``  registers, spills, shared memory and loops of a compiled kernel
- ``interpret``   launches on CPU tensors through Triton's interpreter
"""
