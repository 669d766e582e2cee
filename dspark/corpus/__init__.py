"""From sources of prompts to the token sequences that features are taken from.

Prompts are read, screened, deduplicated and split (`prepare_prompts`); the target answers them (`responses`); prompt
and answer become one token sequence with its loss mask (`read_sequences`).
"""

from dspark.corpus.domains import domain_file, read_domain
from dspark.corpus.prepare import prepare_prompts
from dspark.corpus.prompts import PreparedPrompt, Prompt, Rejection, read_prompts
from dspark.corpus.screening import PromptEncoder
from dspark.corpus.sequences import ResponseRow, TokenSequence, read_sequences
from dspark.corpus.splits import SPLITS, assign_split
from dspark.corpus.summary import PromptsSummary

__all__ = [
    "SPLITS",
    "PreparedPrompt",
    "Prompt",
    "PromptEncoder",
    "PromptsSummary",
    "Rejection",
    "ResponseRow",
    "TokenSequence",
    "assign_split",
    "domain_file",
    "prepare_prompts",
    "read_domain",
    "read_prompts",
    "read_sequences",
]
