// SPDX-License-Identifier: Apache-2.0
#include "attention/schedule.h"

#include <limits>

#include "astrai/host/error.h"

namespace astrai::attention {

QTileSchedule q_tile_schedule(const std::vector<int64_t>& q_lens, int64_t tile_rows) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (tile_rows < 1) throw ValueError(concat("tile_rows: expected at least 1, got ", tile_rows));
  QTileSchedule schedule;
  int64_t total = 0;
  schedule.qo_indptr.push_back(0);
  for (size_t batch = 0; batch < q_lens.size(); ++batch) {
    const int64_t length = q_lens[batch];
    if (length < 0 || length > kMax - total)
      throw ValueError(concat("q_lens: expected lengths of at least 0 and at most ", kMax,
                              " in all, got ", length, " at ", batch));
    total += length;
    schedule.qo_indptr.push_back(static_cast<int32_t>(total));
    for (int64_t row = 0; row < length; row += tile_rows) {
      schedule.q_tile_to_batch.push_back(static_cast<int32_t>(batch));
      schedule.q_tile_to_index.push_back(static_cast<int32_t>(row / tile_rows));
    }
  }
  return schedule;
}

}  // namespace astrai::attention
