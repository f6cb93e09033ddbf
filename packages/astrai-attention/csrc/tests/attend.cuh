// SPDX-License-Identifier: Apache-2.0
// Attention in float64.
#pragma once

#include "check.cuh"

namespace check {

// Row of a token: `head_dim` values.
using Rows = std::function<const Bf16*(int token)>;

// One query head's output for one query, over the tokens below `length` that `keep` admits.
inline std::vector<double> attend(const Bf16* q, const Rows& k, const Rows& v, int length,
                                  int head_dim, const std::function<bool(int)>& keep) {
  std::vector<double> scores(static_cast<size_t>(length));
  double most = -std::numeric_limits<double>::infinity();
  for (int token = 0; token < length; ++token) {
    double score = 0.0;
    for (int d = 0; d < head_dim; ++d)
      score += double{__bfloat162float(q[d])} * double{__bfloat162float(k(token)[d])};
    scores[token] = keep(token) ? score / std::sqrt(double(head_dim))
                                : -std::numeric_limits<double>::infinity();
    most = std::max(most, scores[token]);
  }
  std::vector<double> out(static_cast<size_t>(head_dim), 0.0);
  if (std::isinf(most)) return out;
  double sum = 0.0;
  for (int token = 0; token < length; ++token) {
    const double weight = std::exp(scores[token] - most);
    if (weight == 0.0) continue;
    sum += weight;
    for (int d = 0; d < head_dim; ++d) out[d] += weight * double{__bfloat162float(v(token)[d])};
  }
  for (double& value : out) value /= sum;
  return out;
}

}  // namespace check
