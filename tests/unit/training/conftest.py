from types import SimpleNamespace

import pytest
import torch

from dspark.config.models import TrainingSettings
from dspark.corpus.sequences import TokenSequence
from dspark.drafters.config import DrafterConfig
from dspark.features.sources import FeatureRow, StoredFeatures
from dspark.features.store import shard_key, write_shard

VOCAB, WIDTH = 24, 16


@pytest.fixture
def config():
    return DrafterConfig(
        gamma=3,
        layers=1,
        taps=(0, 1),
        mask_token_id=1,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position=64,
        vocab_size=VOCAB,
        markov_rank=4,
        target_model_type="llama",
        num_target_layers=4,
    )


@pytest.fixture
def target():
    """Embedding and head of a target, [24, 16] each."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(VOCAB, WIDTH, generator=generator), torch.randn(VOCAB, WIDTH, generator=generator)


@pytest.fixture
def make_sequences(target):
    """Sequences of a target that counts: token t is followed by t + 1, and it is nearly sure of it."""
    embedding, head = target

    def make(count, seed=0, lengths=(6, 18)):
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for _ in range(count):
            length = int(torch.randint(*lengths, (1,), generator=generator))
            start = int(torch.randint(0, VOCAB - 2, (1,), generator=generator))
            tokens = 2 + (start + torch.arange(length)) % (VOCAB - 2)
            following = 2 + (tokens - 1) % (VOCAB - 2)
            # A hidden state whose largest logit is the next token's.
            last = 0.6 * head[following] + 0.1 * torch.randn(length, WIDTH, generator=generator)
            taps = torch.cat([embedding[tokens], embedding[following]], -1)
            rows.append(
                SimpleNamespace(
                    token_ids=tokens,
                    prompt_length=int(torch.randint(1, 4, (1,), generator=generator)),
                    taps=taps + 0.05 * torch.randn(taps.shape, generator=generator),
                    last_hidden=last,
                    logsumexp=torch.logsumexp(last @ head.T, -1),
                )
            )
        return rows

    return make


@pytest.fixture
def make_settings():
    def make(**changes):
        fields = {
            "steps": 6,
            "sequences_per_step": 4,
            "anchors_per_sequence": 3,
            "learning_rate": 5e-3,
            "precision": "float32",
            "dev_every_steps": 2,
            "checkpoint_every_steps": 2,
        }
        return TrainingSettings(**fields | changes)

    return make


@pytest.fixture
def store_entries(tmp_path):
    """Write sequences to `store` in shards of three."""

    def store(rows):
        entries = []
        for start in range(0, len(rows), 3):
            part = rows[start : start + 3]
            sequences = [
                TokenSequence(f"{start + n}", "d", row.token_ids.tolist(), row.prompt_length, "stop")
                for n, row in enumerate(part)
            ]
            names = ("taps", "last_hidden", "logsumexp")
            tensors = {name: torch.cat([getattr(row, name) for row in part]) for name in names}
            key = shard_key("0" * 64, (0, 1), "float32", sequences)
            entries.append(write_shard(tmp_path / "store", key, sequences, tensors))
        return entries

    return store


@pytest.fixture
def store_rows(store_entries, tmp_path):
    """The same sequences, on disk."""

    def store(rows):
        source = StoredFeatures(store_entries(rows), tmp_path / "store")
        return [FeatureRow(source, index) for index in range(len(source))]

    return store
