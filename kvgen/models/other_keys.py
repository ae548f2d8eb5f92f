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
from kvgen.models.folder_files import shown

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
}
"""Key -> the field that must say the same."""

PROSE = re.compile(
    r"_.*|auto_map|transformers(\..*|_version|_weights)?|torch_?(dtype|script)|dtype|model_name|name(_or_path)?"
    r"|use_(b?float16|cache|return_dict)|return_dict\w*|output_\w+|gradient_checkpointing\w*|task_\w+"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|tokenizer_class|tf_legacy_loss|prefix"
    r"|(max|min|target|model_max|initial_context|training)_(seq(uence)?_)?len(gth)?|seq_len(gth)?"
    r"|do_sample|temperature|top_[kp]|typical_p|num_(beams|beam_groups|return_sequences)|early_stopping"
    r"|\w+_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|begin_suppress_tokens"
    r"|suppress_tokens|remove_invalid_values|forced_\w+|exponential_decay_length_penalty|\w*token_ids?"
    r"|\w*dropout\w*|\w*flash\w*|\w*attn_implementation\w*|experts_implementation|cache_implementation"
    r"|\w*initiali[sz]er\w*|init_(std|method)\w*|\w*loss\w*|seq_aux|ep_size|use_mems?_efficient\w*"
    r"|chunk_size_feed_forward"
    r"|num_(nextn_predict|mtp)_layers|unsloth\w*|neftune\w*|license|language|pruned_heads|tie_encoder_decoder"
    r"|n_(ctx|positions)|is_decoder"
)
"""Keys of training, of loading, of drawing (which each request decides) and of names: no arithmetic."""

ARITHMETIC = re.compile(
    r"attn|attention|causal|bidirectional|mask|rope|rotary|alibi|position|window|sink|cap|clip|bias|scal|mult"
    r"|mup|norm|quant|compress|bits|sparse|lora|adapter|expert|moe|router|topk|residual|embed|parallel|layer"
    r"|head|logit|softmax|gate|act|conv|swiglu|theta|freq|interleave|_config$|extra_"
)
"""Words of arithmetic: what a key with one of them asks for has to be done, or refused."""


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
            words = f"{key} = {shown(value)}: {family.model} in transformers has no such field"
            yield words, bool(ARITHMETIC.search(key))
