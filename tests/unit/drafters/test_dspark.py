"""The forward pass against a plain reading of deepspec.md, section 1: one block, one head, one query at a time."""

import cmath
import math

import pytest
import torch

from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import SettingsError

ROWS, LENGTH, BLOCKS, GAMMA = 2, 11, 3, 4
ANCHORS = torch.tensor([[2, 5, 9], [1, 6, 10]])


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(vector, position, theta):
    """RoPE as a multiplication of complex numbers: component i pairs with i + hd / 2."""
    half = len(vector) // 2
    result = torch.empty_like(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        rotated = complex(vector[i], vector[i + half]) * cmath.exp(1j * angle)
        result[i], result[i + half] = rotated.real, rotated.imag
    return result


def reference_block(drafter, features, anchor, anchor_id):
    """h of one block [gamma, d] from the features of positions 0 .. anchor-1, in float64."""
    config = drafter.config
    w = {name: value.double() for name, value in drafter.state_dict().items()}
    eps, theta, size = config.rms_norm_eps, config.rope["rope_theta"], config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    context = [rms(w["fc.weight"] @ row.double(), w["hidden_norm.weight"], eps) for row in features[:anchor]]
    ids = [anchor_id] + [config.mask_token_id] * (config.gamma - 1)
    states = [drafter.embedding[token].double() for token in ids]
    for i in range(config.layers):
        p = f"layers.{i}."
        attention = p + "self_attn."
        normed = [rms(x, w[p + "input_layernorm.weight"], eps) for x in states]
        sources = list(zip(range(anchor), context, strict=True)) + [(anchor + j, x) for j, x in enumerate(normed)]
        mixed = []
        for slot, x in enumerate(normed):
            heads = []
            for head in range(config.num_attention_heads):
                rows = slice(head * size, (head + 1) * size)
                kv = slice(head // group * size, (head // group + 1) * size)
                query = rms(w[attention + "q_proj.weight"][rows] @ x, w[attention + "q_norm.weight"], eps)
                query = turn(query, anchor + slot, theta)
                scores, values = [], []
                for position, source in sources:
                    key = rms(w[attention + "k_proj.weight"][kv] @ source, w[attention + "k_norm.weight"], eps)
                    scores.append(query @ turn(key, position, theta) / math.sqrt(size))
                    values.append(w[attention + "v_proj.weight"][kv] @ source)
                weights = torch.softmax(torch.stack(scores), 0)
                heads.append(sum(a * v for a, v in zip(weights, values, strict=True)))
            mixed.append(w[attention + "o_proj.weight"] @ torch.cat(heads))
        states = [x + y for x, y in zip(states, mixed, strict=True)]
        for slot, x in enumerate(states):
            n = rms(x, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ n
            inner = gate / (1 + torch.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ n)
            states[slot] = x + w[p + "mlp.down_proj.weight"] @ inner
    return torch.stack([rms(x, w["norm.weight"], eps) for x in states])


def inputs():
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(ROWS, LENGTH, 64, generator=generator),
        torch.randint(6, 40, (ROWS, BLOCKS), generator=generator),
    )


def hidden(drafter, features, anchor_ids, *, sees=0, offset=0):
    """h of all blocks in one call; `sees` and `offset` are for mutants."""
    visible = torch.arange(LENGTH) < ANCHORS[..., None] + sees
    positions = ANCHORS[..., None] + torch.arange(GAMMA) + offset
    return drafter.block_hidden(
        drafter.block_inputs(anchor_ids),
        drafter.project(features),
        torch.arange(LENGTH).expand(ROWS, LENGTH),
        positions,
        visible,
    )


def reference(drafter, features, anchor_ids):
    return torch.stack(
        [
            torch.stack(
                [
                    reference_block(drafter, features[b], int(ANCHORS[b, n]), int(anchor_ids[b, n]))
                    for n in range(BLOCKS)
                ]
            )
            for b in range(ROWS)
        ]
    )


def test_many_blocks_at_once_equal_each_block_alone(make_drafter):
    drafter = make_drafter()
    features, ids = inputs()
    found = hidden(drafter, features, ids).double()
    assert torch.allclose(found, reference(drafter, features, ids), atol=1e-5)


@pytest.mark.parametrize("mutant", [{"sees": 1}, {"offset": 1}, {"offset": -1}, {"sees": -1}])
def test_context_with_the_anchor_or_rope_off_by_one_is_caught(make_drafter, mutant):
    """The comparison above tells these mistakes apart: each moves h by far more than its tolerance."""
    drafter = make_drafter()
    features, ids = inputs()
    found = hidden(drafter, features, ids, **mutant).double()
    assert (found - reference(drafter, features, ids)).abs().max() > 1e-2


def test_no_block_sees_a_position_at_or_behind_its_anchor(make_drafter):
    drafter = make_drafter()
    features, ids = inputs()
    before = hidden(drafter, features, ids)
    changed = features.clone()
    changed[:, 5:] += 10.0
    after = hidden(drafter, changed, ids)
    assert torch.equal(before[0, :2], after[0, :2])  # anchors 2 and 5 of row 0
    assert torch.equal(before[1, :1], after[1, :1])  # anchor 1 of row 1
    assert not torch.allclose(before[0, 2], after[0, 2])  # anchor 9
    assert not torch.allclose(before[1, 1], after[1, 1])  # anchor 6 sees position 5


def test_no_block_sees_another_block_or_another_row(make_drafter):
    drafter = make_drafter()
    features, ids = inputs()
    before = hidden(drafter, features, ids)
    other = ids.clone()
    other[0, 1] = (ids[0, 1] + 1) % 40
    after = hidden(drafter, features, other)
    same = torch.ones(ROWS, BLOCKS, dtype=torch.bool)
    same[0, 1] = False
    assert torch.equal(before[same], after[same])
    assert not torch.allclose(before[0, 1], after[0, 1])


def test_every_slot_of_a_block_sees_every_other(make_drafter):
    """Bidirectional inside the block: changing the input of the last slot moves the first one's h."""
    drafter = make_drafter()
    features, ids = inputs()
    block = drafter.block_inputs(ids)
    assert block[0, 0].tolist() == [int(ids[0, 0]), 5, 5, 5]
    context = drafter.project(features)
    positions = ANCHORS[..., None] + torch.arange(GAMMA)
    visible = torch.arange(LENGTH) < ANCHORS[..., None]
    arguments = (context, torch.arange(LENGTH).expand(ROWS, LENGTH), positions, visible)
    before = drafter.block_hidden(block, *arguments)
    block[..., -1] = 6
    assert not torch.allclose(before[..., 0, :], drafter.block_hidden(block, *arguments)[..., 0, :])


@pytest.mark.parametrize("gradients", [False, True])
def test_blocks_of_one_slot_are_blocks_like_others(make_drafter, gradients):
    drafter = make_drafter(gamma=1).requires_grad_(gradients)
    features, ids = inputs()
    found = drafter.block_hidden(
        drafter.block_inputs(ids),
        drafter.project(features),
        torch.arange(LENGTH).expand(ROWS, LENGTH),
        ANCHORS[..., None],
        torch.arange(LENGTH) < ANCHORS[..., None],
    )
    assert torch.allclose(found.double(), reference(drafter, features, ids), atol=1e-5)


def test_a_block_without_context_attends_to_itself(make_drafter):
    drafter = make_drafter()
    features, ids = inputs()
    visible = torch.zeros(ROWS, BLOCKS, LENGTH, dtype=torch.bool)
    positions = torch.arange(GAMMA).expand(ROWS, BLOCKS, GAMMA)
    context = drafter.project(features)
    found = drafter.block_hidden(
        drafter.block_inputs(ids), context, torch.arange(LENGTH).expand(ROWS, LENGTH), positions, visible
    )
    expected = reference_block(drafter, features[0], 0, int(ids[0, 0]))
    assert torch.allclose(found[0, 0].double(), expected, atol=1e-5)


def test_parameters_are_named_and_shaped_as_deepspec_names_them(make_drafter):
    """deepspec.md, section 1.2, with d 32, m 2, h 4, kv 2, hd 6, I 48, V 40, r 4."""
    shapes = {name: tuple(value.shape) for name, value in make_drafter(layers=1).named_parameters()}
    assert shapes == {
        "fc.weight": (32, 64),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (24, 32),
        "layers.0.self_attn.k_proj.weight": (12, 32),
        "layers.0.self_attn.v_proj.weight": (12, 32),
        "layers.0.self_attn.o_proj.weight": (32, 24),
        "layers.0.self_attn.q_norm.weight": (6,),
        "layers.0.self_attn.k_norm.weight": (6,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
        "markov_head.markov_w1.weight": (40, 4),
        "markov_head.markov_w2.weight": (40, 4),
        "confidence_head.proj.weight": (1, 36),
        "confidence_head.proj.bias": (1,),
    }


def test_attention_bias_follows_the_target(make_drafter):
    names = dict(make_drafter(layers=1, attention_bias=True).named_parameters())
    assert {name for name in names if name.endswith("_proj.bias") and "attn" in name} == {
        f"layers.0.self_attn.{part}_proj.bias" for part in "qkvo"
    }


def test_heads_are_the_paper_s_formulas(make_drafter):
    drafter = make_drafter()
    h = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    previous = torch.tensor([7, 0, 39])
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    assert torch.allclose(drafter.base_logits(h), h @ drafter.head.T, atol=1e-5)
    assert torch.allclose(drafter.chain().bias(previous, h), w1[previous] @ w2.T, atol=1e-6)
    weight, bias = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias
    expected = torch.cat([h, w1[previous]], -1) @ weight + bias
    assert torch.allclose(drafter.confidence_logits(h, previous), expected, atol=1e-6)


def test_a_reduced_vocabulary_gathers_the_head_and_gives_up_one_markov_channel(make_drafter):
    whole, reduced = make_drafter(), make_drafter(draft_vocab_size=10)
    ids = reduced.draft_token_ids
    h = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(reduced.base_logits(h), whole.base_logits(h)[:, ids], atol=1e-5)
    previous = torch.tensor([7, 0, 39])
    w1, w2 = reduced.markov_head.markov_w1.weight, reduced.markov_head.markov_w2.weight
    assert w1.shape == (40, 4)
    assert w2.shape == (10, 4)
    assert (w1[:, 0] == 1).all()
    expected = w1[previous, 1:] @ w2[:, 1:].T + w2[:, 0]
    assert torch.allclose(reduced.chain().bias(previous, h), expected, atol=1e-6)
    assert torch.equal(reduced.to_target_ids(torch.tensor([0, 9])), ids[[0, 9]])
    assert torch.equal(whole.to_target_ids(torch.tensor([0, 9])), torch.tensor([0, 9]))


def test_the_constant_channel_gets_no_gradient(make_drafter):
    drafter = make_drafter(draft_vocab_size=10).requires_grad_(True)
    previous = torch.tensor([7, 0, 39])
    h = torch.randn(3, 32)
    (drafter.chain().bias(previous, h).square().sum() + drafter.confidence_logits(h, previous).sum()).backward()
    w1, w2 = drafter.markov_head.markov_w1.weight.grad, drafter.markov_head.markov_w2.weight.grad
    assert (w1[:, 0] == 0).all()
    assert (w1[previous, 1:] != 0).all()
    assert (w2 != 0).all()  # channel 0 of W2 is a bias per token, and trained


@pytest.mark.parametrize("gradients", [False, True])
def test_a_stored_channel_counts_as_it_is(make_drafter, gradients):
    """A reduced drafter from elsewhere has no constant in channel 0; nothing is put in its place."""
    drafter = make_drafter(draft_vocab_size=10)
    assert drafter.markov_head.constant_channel
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    w1[:, 0] = torch.arange(40) / 10
    assert not drafter.markov_head.constant_channel
    previous, h = torch.tensor([7, 0, 39]), torch.zeros(3, 32)
    with torch.set_grad_enabled(gradients):
        assert torch.allclose(drafter.chain().bias(previous, h), w1[previous] @ w2.T, atol=1e-6)


def test_the_target_s_tensors_are_shared_and_never_trained(make_config):
    embedding, head = torch.randn(40, 32), torch.randn(40, 32)
    drafter = DSparkDrafter(make_config(), embedding, head)
    assert drafter.embedding.data_ptr() == embedding.data_ptr()
    assert drafter.head.data_ptr() == head.data_ptr()
    names = {name for name, _ in drafter.named_parameters()}
    assert set(drafter.state_dict()) == names  # neither is saved


def test_equal_seeds_give_equal_drafters(make_config):
    tensors = torch.zeros(40, 32), torch.zeros(40, 32)
    one, two, other = (DSparkDrafter(make_config(), *tensors, seed=seed).fc.weight for seed in (4, 4, 5))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_bfloat16_keeps_rope_angles_exact(make_drafter):
    """bfloat16 cannot tell position 4097 from 4096."""
    drafter = make_drafter().to(torch.bfloat16)
    cos, _ = drafter.rotary(torch.tensor([4096, 4097]))
    assert cos.dtype == torch.float32
    assert cos[:, 0].tolist() == pytest.approx([math.cos(4096), math.cos(4097)], abs=1e-3)
    assert drafter.block_inputs(torch.tensor([1])).shape == (1, 4)


def test_tensors_of_another_target_are_refused(make_config):
    with pytest.raises(SettingsError, match=r"embedding is \[39, 32\]"):
        DSparkDrafter(make_config(), torch.zeros(39, 32), torch.zeros(40, 32))


@pytest.mark.parametrize(
    "ids",
    [
        None,
        torch.arange(9),
        torch.arange(10).flip(0),
        torch.arange(31, 41),
        torch.zeros(10, dtype=torch.int64),
        torch.arange(10, dtype=torch.int32),
    ],
)
def test_draft_ids_must_be_ascending_ids_of_the_target(make_config, ids):
    with pytest.raises(SettingsError, match="draft_token_ids"):
        DSparkDrafter(make_config(draft_vocab_size=10), torch.zeros(40, 32), torch.zeros(40, 32), ids)


def test_draft_ids_need_a_reduced_vocabulary(make_config):
    with pytest.raises(SettingsError, match="whole vocabulary"):
        DSparkDrafter(make_config(), torch.zeros(40, 32), torch.zeros(40, 32), torch.arange(10))
