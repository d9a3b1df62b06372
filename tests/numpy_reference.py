"""Test-time normalization in plain NumPy and float64, written from the paper's Eq. 1 and 2.

Shares nothing with the library: one loop over groups, one over channels.
"""

from __future__ import annotations

import numpy as np


def test_time_norm(
    x, source_mean, source_var, weight, bias, alpha, eps=1e-5, group_size=None, cross_term=True
):
    x = np.asarray(x, dtype=np.float64)
    y = np.empty_like(x)
    size = len(x) if group_size is None else group_size
    for start in range(0, len(x), size):
        group = slice(start, start + size)
        for c in range(x.shape[1]):
            z = x[group, c]
            mu, var = z.mean(), ((z - z.mean()) ** 2).mean()
            a = alpha[c]
            mixed_mean = a * mu + (1 - a) * source_mean[c]
            mixed_var = a * var + (1 - a) * source_var[c]
            if cross_term:
                mixed_var += a * (1 - a) * (mu - source_mean[c]) ** 2
            gamma = 1.0 if weight is None else weight[c]
            beta = 0.0 if bias is None else bias[c]
            y[group, c] = (z - mixed_mean) / np.sqrt(mixed_var + eps) * gamma + beta
    return y


test_time_norm.__test__ = False
