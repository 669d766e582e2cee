"""Attention of a batched decoding step: query heads of a group laid together against torch's own grouping."""

import torch
from pairs import ratio, report
from torch.nn import functional

from dspark.targets.attention import grouped_attention

ROWS, HEADS, KV_HEADS, WIDTH, KEYS, CAPACITY = 128, 9, 3, 64, 150, 220  # SmolLM2 in the demo's `responses`


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for queries in (1, 5, 8):
            # Views of a cache with room for more, as a decoding step sees them.
            key, value = (torch.randn(ROWS, KV_HEADS, CAPACITY, WIDTH, dtype=dtype)[:, :, :KEYS] for _ in range(2))
            query = torch.randn(ROWS, queries, HEADS, WIDTH, dtype=dtype).transpose(1, 2)
            mask = torch.rand(ROWS, 1, queries, KEYS) > 0.1
            measured = ratio(
                lambda q=query, k=key, v=value, m=mask: grouped_attention(torch.nn.Module(), q, k, v, m),
                lambda q=query, k=key, v=value, m=mask: functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=m, enable_gqa=True
                ),
            )
            report(f"attention, {queries} queries a row, {str(dtype).removeprefix('torch.')}", measured)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
