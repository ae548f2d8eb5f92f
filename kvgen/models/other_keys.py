"""Keys of a config.json that the model's class in transformers does not have.

Some say nothing about the numbers, some say what the class does anyway, and some ask for arithmetic that
nobody here does: a model that ran without it would give other text than its makers saw. Those are refused by
name. Keys that nobody has heard of are refused where their name is one of arithmetic, and else reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvgen.models.families import Family
from kvgen.models.folder_files import named, shown

EMPTY = ("null", "false", '""', "[]", "{}")
"""Values that ask for nothing, as JSON. 0 is none of them: a window of 0 would be one."""

READ = frozenset({"model_type", "architectures", "use_sliding_window", "max_window_layers", "layer_types"})
"""Keys that kvgen itself looks at."""

SAYINGS: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "moe_layer_freq": (1,),
    "rotary_pct": (1, 1.0),
    "position_embedding_type": ("rope", "rotary"),
}
"""Key -> the only values, beside null, that the families compute."""

SYNONYMS = {
    "num_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "qk_head_dim": "qk_head_dim",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "sliding_window_size": "sliding_window",
}
"""Key -> the field that must say the same."""


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


PROSE = _any_of(
    # Who made it, with what.
    r"_.*|name(_or_path)?|model_name|license|language|transformers(_version|\..*)|auto_map|tokenizer_class",
    r"unsloth\w*|neftune\w*|prefix|finetuning_task|task_\w+|problem_type|id2label|label2id|num_labels",
    # Training.
    r"\w*dropout\w*|layer_?drop\w*|\w*loss\w*|\w*initiali[sz]er\w*|init_(std|method)\w*|seq_aux|ep_size",
    r"(gradient|activation)_checkpoint\w*|num_(nextn_predict|mtp)_layers|pruned_heads|tie_encoder_decoder",
    # Loading.
    r"dtype|torch_?(dtype|script)|use_(cache|b?float16|return_dict)|return_dict\w*|output_\w+|tf_legacy_loss",
    r"\w*flash\w*|\w*(attn|experts|cache)_implementation\w*|chunk_size_feed_forward|is_(decoder|llama_config)|multiple_of",
    # Lengths that positions do not stop at, and what each request decides.
    r"(max|min|target|model_max|initial_context|training)_(seq(uence)?_)?len(gth)?|seq_len(gth)?|n_(ctx|positions)",
    r"do_sample|temperature|top_[kp]|typical_p|num_(beams|beam_groups|return_sequences)|early_stopping",
    r"\w+_penalty|(encoder_)?no_repeat_ngram_size|(begin_)?suppress_tokens|bad_words_ids|forced_\w+",
    r"remove_invalid_values|\w*_token(_ids?)?",
)
"""Keys that say nothing about arithmetic, whole."""

ARITHMETIC = _any_of(
    r"attn|attention|causal|bidirectional|mask|window|sink|softmax|logit|soft_?cap|clip|head|interleave",
    r"rope|rotary|alibi|position|theta|freq|scal|mult|mup|norm|residual|embed|parallel|layer|bias",
    r"quant|compress|bits|sparse|lora|adapter|expert|moe|router|topk|gated?\b|gate_|swiglu|activation|_act",
    r"conv(?!er)|_config$|extra_",
)
"""Words of arithmetic inside a key: what it asks for has to be done, or refused."""


def other_keys(config: dict[str, Any], family: Family, used: Any) -> Iterator[tuple[str, bool]]:
    """What keys say beyond what the class of a family computes, in words, and whether to refuse it.

    ``used``: the config of transformers, by which other words for its fields are judged.
    """
    known, sayings, synonyms = family.reads(), {**SAYINGS, **family.sayings}, {**SYNONYMS, **family.synonyms}
    for key, value in config.items():
        if key in sayings or (key in synonyms and key not in known):
            same = sayings[key] if key in sayings else (getattr(used, synonyms[key], None),)
            if value is not None and shown(value) not in map(shown, same):
                yield f"{key} = {shown(value)}: {family.model} computes {' or '.join(map(shown, same))}", True
        elif key not in known | READ and shown(value) not in EMPTY and not PROSE.fullmatch(key):
            words = f"{named(key)} = {shown(value)}: {family.model} in transformers has no such field"
            yield words, bool(ARITHMETIC.search(key))
