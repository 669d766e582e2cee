from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.config.models import InitialWeights, MixtureSettings
from dspark.drafters.checkpoint import MARKOV_W2, write_union
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.reduced import read_trainable
from dspark.errors import DataError, IntegrityError, Interrupted, SettingsError
from dspark.io.digest import digest_file
from dspark.io.progress import Progress
from dspark.training.initialisation import SMOOTHING, UNSEEN, bigrams
from dspark.training.trainer import train
from dspark.training.vocabulary import draft_columns, select_draft_tokens
from dspark.training.warm_start import RIDGE, Initial, read_initial, warm_start

RECORD = SimpleNamespace(
    name="tiny",
    public_id=None,
    architecture="LlamaForCausalLM",
    revision="x",
    embedding_digest="e",
    head_digest="h",
    eos_token_ids=(2,),
)
REDUCED = {"draft_vocab_size": 12}


@pytest.fixture
def run(config, target, make_sequences, make_settings):
    """Train on the counting target, from given weights or none."""
    train_rows, dev_rows = make_sequences(9), make_sequences(4, seed=1)
    for index, row in enumerate(train_rows):
        row.domain = "sql" if index >= 5 else "math"

    def go(work, initial=None, progress=None, drafter=config, rows=train_rows, **changes):
        settings = make_settings(**changes)
        return train(drafter, *target, rows, dev_rows, settings, work, progress, eos_token_ids=[2], initial=initial)

    return go


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class StopAfter(Progress):
    def __init__(self, steps):
        self.left = steps

    def advance(self, count=1, **fields):
        self.left -= count
        if self.left == 0:
            raise Interrupted("stopped")


@pytest.mark.parametrize("changes", [{}, REDUCED, {"markov_type": "gated"}, {"markov_type": "rnn"}])
def test_a_package_s_drafter_is_trained_on_as_if_it_had_stayed_in_memory(run, tmp_path, config, target, changes):
    """The union checkpoint is bfloat16, so the weights in memory are rounded to it first; then every bit is equal."""
    config = config.model_copy(update=changes)
    first = run(tmp_path / "first", drafter=config)
    write_union(tmp_path / "drafter", first.drafter, RECORD)
    read = Initial(read_trainable(tmp_path / "drafter", *target, record=RECORD))
    rounded = DSparkDrafter(config, *target, first.drafter.draft_token_ids if changes == REDUCED else None)
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in first.drafter.state_dict().items()})
    kept = Initial(rounded)
    assert read.digest == kept.digest
    one = run(tmp_path / "read", read, drafter=config, seed=5)
    two = run(tmp_path / "kept", kept, drafter=config, seed=5)
    assert same(one.drafter.state_dict(), two.drafter.state_dict())
    assert one.metrics == two.metrics and one.metrics.initial is not None
    scratch = run(tmp_path / "scratch", drafter=config, seed=5)
    assert not same(one.drafter.state_dict(), scratch.drafter.state_dict())


def test_training_starts_exactly_where_the_other_ended(run, tmp_path):
    """Without rounding, the dev split sees at step 0 what it saw of the handed-on weights."""
    first = run(tmp_path / "first", fit_confidence=False)
    second = run(tmp_path / "second", Initial(first.drafter))
    best = first.metrics.best.model_dump(exclude={"step"})
    assert second.metrics.initial.model_dump(exclude={"step"}) == best
    assert second.metrics.initial.step == 0 and first.metrics.initial is None


@pytest.mark.parametrize("optimizer", ["muon"])
def test_a_killed_run_continues_to_the_same_bits(run, tmp_path, config, optimizer):
    reduced = config.model_copy(update=REDUCED)
    initial = Initial(run(tmp_path / "first", drafter=reduced).drafter)
    mixture = MixtureSettings(new=("sql",), replay=0.5)
    how = {"drafter": reduced, "optimizer": optimizer, "mixture": mixture}
    whole = run(tmp_path / "whole", initial, **how)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", initial, StopAfter(3), **how)
    continued = run(tmp_path / "cut", initial, **how)
    assert same(whole.drafter.state_dict(), continued.drafter.state_dict())
    assert whole.metrics == continued.metrics
    # Six steps of four sequences, two of them replayed; whatever was done before the stop counts once.
    assert continued.metrics.drawn_sequences == {"math": 12, "sql": 12}


def test_a_checkpoint_of_other_initial_weights_is_refused(run, tmp_path):
    first = run(tmp_path / "first")
    run(tmp_path / "work", Initial(first.drafter), steps=2)
    with pytest.raises(DataError, match=r'initial: was "[0-9a-f]{64}", is "[0-9a-f]{64}"'):
        other = DSparkDrafter(first.drafter.config, first.drafter.embedding, first.drafter.head, seed=9)
        run(tmp_path / "work", Initial(other), steps=2)
    with pytest.raises(DataError, match=r'initial: was "[0-9a-f]{64}", is absent'):
        run(tmp_path / "work", steps=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gamma": 4}, r"from-here: .*gamma is 4, here 3"),
        ({"layers": 2}, "layers is 2, here 1"),
        ({"taps": (0, 2)}, r"taps is \[0, 2\], here \[0, 1\]"),
        ({"markov_rank": 6}, "markov_rank is 6, here 4"),
        ({"markov_type": "rnn"}, "markov_type is rnn, here vanilla"),
        ({"draft_vocab_size": 12}, "draft_vocab_size is 12, here None"),
        ({"target_model_type": "qwen3"}, "target_model_type is qwen3, here llama"),
    ],
)
def test_weights_of_another_architecture_are_refused_with_the_reason(run, tmp_path, config, target, changes, reason):
    other = config.model_copy(update=changes)
    ids = torch.arange(12) if other.draft_vocab_size else None
    with pytest.raises(SettingsError, match=reason):
        run(tmp_path, Initial(DSparkDrafter(other, *target, ids), "from-here"))
    assert not any(tmp_path.iterdir())


def test_weights_of_another_target_are_refused(run, tmp_path, target):
    write_union(tmp_path / "drafter", run(tmp_path / "work").drafter, RECORD)
    other = SimpleNamespace(**{**vars(RECORD), "embedding_digest": "another"})
    with pytest.raises(IntegrityError, match="belongs to tiny, not to this tiny"):
        read_trainable(tmp_path / "drafter", *target, record=other)


def test_what_is_read_must_be_the_file_that_was_verified(run, tmp_path, target):
    write_union(tmp_path / "drafter", run(tmp_path / "work").drafter, RECORD)
    names = ("drafter/config.json", "drafter/model.safetensors")
    files = {name: digest_file(tmp_path / name) for name in names}
    assert read_initial(tmp_path, files, *target, RECORD).where == str(tmp_path)
    for name in names:
        with pytest.raises(IntegrityError, match=f"{name}: missing, or not the file that was verified"):
            read_initial(tmp_path, files | {name: "0" * 64}, *target, RECORD)
    (tmp_path / names[0]).unlink()
    with pytest.raises(IntegrityError, match="missing, or not the file"):
        read_initial(tmp_path, files, *target, RECORD)


def test_settings_that_name_weights_do_not_train_without_them(config, target, make_sequences, make_settings, tmp_path):
    settings = make_settings(initial=InitialWeights(package="0" * 64))
    with pytest.raises(ValueError, match="none were given"):
        train(config, *target, make_sequences(9), make_sequences(4, seed=1), settings, tmp_path)


def test_a_union_checkpoint_that_has_lost_a_token_s_row_is_refused(run, tmp_path, config, target):
    first = run(tmp_path / "first", drafter=config.model_copy(update=REDUCED))
    first.drafter.markov_head.markov_w2.weight[3, 0] = -1000.0
    first.drafter.markov_head.markov_w2.weight[3, 1:] = 0
    write_union(tmp_path / "drafter", first.drafter, RECORD)
    with pytest.raises(IntegrityError, match=r"11 rows of .* stand for tokens, config.json says 12"):
        read_trainable(tmp_path / "drafter", *target, record=RECORD)


# ---------------------------------------------------------------- a reduced vocabulary


def rows_of(*texts):
    return [SimpleNamespace(token_ids=torch.tensor(text), prompt_length=0) for text in texts]


def test_known_tokens_stay_unless_a_new_one_is_said_more_often():
    """4 is said once and displaces one of the known tokens that nobody says; of 9 and 20, the lower id stays."""
    choose = {"always": [2], "never": [1]}
    known = torch.tensor([2, 9, 15, 20])
    said = rows_of([15, 15, 4])
    assert select_draft_tokens(said, 4, 24, **choose, known=known).tolist() == [2, 4, 9, 15]
    # Said as often as each other: whoever is known stays, though lower ids would win otherwise.
    assert select_draft_tokens(rows_of([4, 15, 9, 20]), 4, 24, **choose, known=known).tolist() == [2, 9, 15, 20]
    assert select_draft_tokens(rows_of([4, 15, 9, 20]), 4, 24, **choose).tolist() == [2, 4, 9, 15]
    assert select_draft_tokens(rows_of([3, 3, 4]), 3, 24, **choose, known=known).tolist() == [2, 3, 4]


@pytest.fixture
def retrained(config, target, make_sequences):
    """A drafter that knew the tokens 0, 2 .. 12, given to one whose responses also say 13 .. 23."""
    generator = torch.Generator().manual_seed(3)
    known = torch.tensor([0, *range(2, 13)])
    sizes = {"draft_vocab_size": 12, "markov_rank": 4}
    initial = Initial(DSparkDrafter(config.model_copy(update=sizes), *target, known, seed=1))
    w2 = initial.drafter.markov_head.markov_w2.weight
    w2.requires_grad_(False).copy_(torch.randn(w2.shape, generator=generator))
    rows = make_sequences(40, seed=2, lengths=(10, 30))
    ids = select_draft_tokens(rows, 12, 24, always=[2], never=[1], known=known)
    columns = draft_columns(ids, 24)
    drafter = DSparkDrafter(initial.drafter.config, *target, ids, seed=8)
    warm_start(drafter, initial, rows, columns)
    return initial, drafter, rows, columns


def test_rows_of_kept_tokens_move_with_them_and_all_else_is_carried_over(retrained):
    initial, drafter, _, columns = retrained
    before, after = initial.drafter.state_dict(), drafter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != MARKOV_W2)
    kept = [token for token in initial.drafter.draft_token_ids.tolist() if columns[token] >= 0]
    assert 2 <= len(kept) < 12
    for token in kept:
        old = initial.drafter.draft_token_ids.tolist().index(token)
        assert torch.equal(after[MARKOV_W2][columns[token]], before[MARKOV_W2][old])


def test_the_row_of_a_new_token_is_the_least_squares_fit_of_what_the_responses_do(retrained):
    """Solved here another way, by numpy's lstsq over all (u, v) with the ridge as further rows."""
    initial, drafter, rows, columns = retrained
    previous, following = (part.numpy() for part in bigrams(rows, columns))
    w1 = initial.drafter.markov_head.markov_w1.weight.detach().double().numpy()[:, 1:]
    counts = np.zeros((24, 12))
    np.add.at(counts, (previous, following), 1)
    said = counts.sum(0) + UNSEEN
    probability = said / said.sum()
    weights = np.sqrt(counts.sum(1))
    ridge = RIDGE * np.mean((weights[:, None] * w1) ** 2) * 24
    known = initial.drafter.draft_token_ids.tolist()
    after = drafter.markov_head.markov_w2.weight.detach().double().numpy()
    kept = [int(columns[token]) for token in known if columns[token] >= 0]
    level = np.average(after[kept, 0] - np.log(probability[kept]), weights=probability[kept])
    new = sorted(set(range(12)) - set(kept))
    assert new
    for column in new:
        wanted = np.log1p(counts[:, column] / (SMOOTHING * probability[column]))
        left = np.concatenate([weights[:, None] * w1, np.sqrt(ridge) * np.eye(3)])
        expected, *_ = np.linalg.lstsq(left, np.concatenate([weights * wanted, np.zeros(3)]), rcond=None)
        np.testing.assert_allclose(after[column, 1:], expected, rtol=1e-3, atol=1e-5)
        assert after[column, 0] == pytest.approx(np.log(probability[column]) + level, rel=1e-5)


def test_a_new_token_is_likelier_where_it_was_seen_than_its_random_row_would_have_it(retrained, target):
    """Mean log-probability of the new tokens under the Markov head alone, after the tokens that came before them."""
    initial, drafter, rows, columns = retrained
    previous, following = bigrams(rows, columns)
    known = initial.drafter.draft_token_ids
    is_new = torch.ones(12, dtype=torch.bool)
    is_new[columns[known[columns[known] >= 0]]] = False
    chosen = is_new[following]

    def score(head):
        logits = head.bias(head.embed(previous[chosen]))
        return float(torch.log_softmax(logits.detach(), -1).gather(1, following[chosen].unsqueeze(1)).mean())

    fitted = score(drafter.markov_head)
    drafter.markov_head.markov_w2.weight.requires_grad_(False)[is_new] = 0.02 * torch.randn(
        int(is_new.sum()), 4, generator=torch.Generator().manual_seed(0)
    )
    assert fitted > score(drafter.markov_head)
