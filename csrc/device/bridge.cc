#include "device/bridge.h"

#include "device/numa.h"
#include "transport/segment.h"

namespace ringcomm::cuda {

constexpr uint32_t kNumber = 1;  // no chunk has so low a number

Bridge::~Bridge() {
  for (const Part& part : parts_) {
    if (part.on_device == nullptr) continue;
    try {
      context_.api.unregister_host(part.memory.data());
    } catch (const DeviceError&) {  // the driver may be shutting down
      continue;
    }
  }
}

void Bridge::add(Rank rank, const Fd& memory) {
  Part& part = parts_[static_cast<size_t>(rank)];
  part.memory = Mapping(memory, kBytes);
  part.on_device = context_.api.register_host(part.memory.data(), kBytes);
}

void Bridge::offer(int node) {
  const Fd memory = make_sealed_memfd("ringcomm-ring", kBytes);
  {
    const OnNode beside(node);
    add(context_.transport.rank(), memory);
  }
  for (Rank peer = 0; peer < context_.transport.size(); ++peer) {
    if (peer != context_.transport.rank()) context_.send(peer, kNumber, memory);
  }
}

void Bridge::open() {
  if (at(context_.transport.rank()) == nullptr) throw DeviceError("no memory for the ring");
  for (Rank peer = 0; peer < context_.transport.size(); ++peer) {
    if (peer == context_.transport.rank()) continue;
    const Fd memory = context_.transport.take(peer, kNumber);
    if (!memory) throw DeviceError(str("rank ", peer, "'s memory for the ring did not come"));
    check_sealed_memfd(memory, kBytes, peer);
    add(peer, memory);
  }
}

}  // namespace ringcomm::cuda
