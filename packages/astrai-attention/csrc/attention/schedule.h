// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace astrai::attention {

// The query tiles of a ragged batch: no tile crosses from one sequence into the next, none is empty.
struct QTileSchedule {
  std::vector<int32_t> qo_indptr;        // where each sequence's queries begin; then the total
  std::vector<int32_t> q_tile_to_batch;  // sequence of each tile
  std::vector<int32_t> q_tile_to_index;  // position of each tile within its sequence
};

QTileSchedule q_tile_schedule(const std::vector<int64_t>& q_lens, int64_t tile_rows);

}  // namespace astrai::attention
