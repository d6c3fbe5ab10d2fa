// A place in a plan: the next step, and its operands in this pass and round. All executors walk
// plans with it.
#pragma once

#include <algorithm>

#include "plan/plan.h"

namespace ringcomm {

class PlanCursor {
 public:
  PlanCursor() = default;
  explicit PlanCursor(const Plan& plan) : plan_(&plan) {
    if (!plan.loops.empty()) enter(plan.loops.front().first_block);
  }

  explicit operator bool() const { return step_ != nullptr; }  // false: at the end
  const Step& operator*() const { return *step_; }
  const Step* operator->() const { return step_; }
  void next() {
    if (++step_ == end_) turn();
  }

  // Returns the bytes that the step moves: 0 where nothing is left of its extent.
  uint64_t bytes() const {
    if (step_->extent == 0) return step_->bytes;
    const uint64_t end = extent(step_->extent).bytes, at = step_->at + moved(step_->motion);
    return at < end ? std::min(step_->bytes, end - at) : 0;
  }
  uint64_t offset(const Ref& ref) const {
    const uint64_t offset = ref.offset + moved(ref.motion);
    return ref.extent == 0 ? offset : offset + extent(ref.extent).offset;
  }

  uint32_t block() const { return block_; }
  uint64_t pass() const { return pass_; }
  uint32_t round() const { return round_; }

 private:
  const Extent& extent(uint16_t number) const { return plan_->extents[number - 1u + round_]; }

  uint64_t moved(uint8_t number) const {
    if (number == 0) return 0;
    const Motion& motion = plan_->motions[number - 1u];
    if (motion.slots == 0) return pass_ * motion.bytes;
    const uint64_t turns = motion.first + pass_ * motion.pass + uint64_t{round_} * motion.round;
    return (turns & (motion.slots - 1u)) * motion.bytes;
  }

  void enter(uint32_t block) {
    block_ = block;
    step_ = plan_->steps.data() + plan_->blocks[block].first_step;
    end_ = step_ + plan_->blocks[block].step_count;
  }

  // Goes on from the end of a block: to its next round, the next block, pass or loop.
  void turn() {
    if (++round_ < plan_->blocks[block_].rounds) return enter(block_);
    round_ = 0;
    const Loop& loop = plan_->loops[loop_];
    if (block_ + 1 < loop.first_block + loop.block_count) return enter(block_ + 1);
    if (++pass_ < loop.passes) return enter(loop.first_block);
    pass_ = 0;
    step_ = nullptr;
    if (++loop_ < plan_->loops.size()) enter(plan_->loops[loop_].first_block);
  }

  const Plan* plan_ = nullptr;
  const Step* step_ = nullptr;
  const Step* end_ = nullptr;  // of the block
  uint32_t loop_ = 0, block_ = 0, round_ = 0;
  uint64_t pass_ = 0;
};

}  // namespace ringcomm
