"""export: a library that runs without kvgen; ``package`` writes it, ``vendor`` picks the code it needs."""
