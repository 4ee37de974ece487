"""Special tokens that end an answer, whatever the files of a model say."""

ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|return|>", "<|call|>")
"""Special tokens that end an answer wherever a vocabulary has them. Files name one of them, or two."""
