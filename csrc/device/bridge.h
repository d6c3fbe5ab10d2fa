// The memory of the host through which the ring runs where devices can't map one another's memory,
// as with GeForce cards: each rank's slots and flags, which all ranks map and register.
#pragma once

#include "device/exports.h"

namespace ringcomm::cuda {

class Bridge {
 public:
  explicit Bridge(ExportContext context) : context_(std::move(context)) {}
  ~Bridge();
  Bridge(const Bridge&) = delete;

  // Makes this rank's memory, beside its device, and passes it to the others. Then, once all have
  // done so, maps theirs. Both throw where that can't be.
  void offer(int node);
  void open();

  // Returns the device's addresses.
  Flags* flags(Rank rank) const { return reinterpret_cast<Flags*>(at(rank)); }
  std::byte* slots(Rank rank) const { return at(rank) + kFlagBytes; }

 private:
  static constexpr uint64_t kFlagBytes = (sizeof(Flags) + 4095) / 4096 * 4096;
  static constexpr uint64_t kBytes = kFlagBytes + kRingBytes;
  struct Part {  // a rank's
    Mapping memory;
    std::byte* on_device = nullptr;
  };

  std::byte* at(Rank rank) const { return parts_[static_cast<size_t>(rank)].on_device; }
  void add(Rank rank, const Fd& memory);

  const ExportContext context_;
  std::vector<Part> parts_ = std::vector<Part>(static_cast<size_t>(context_.transport.size()));
};

}  // namespace ringcomm::cuda
