#include "device/peers.h"

#include <climits>

#include "device/residency.h"

namespace ringcomm::cuda {
namespace {

// The bytes that each rank gives each group. Rounds on a large GPU need to be large, since
// launching costs as much as moving 20 MB.
constexpr uint64_t kLeast = 16 << 20, kMost = 256 << 20, kShareOfDevice = 512;
constexpr uint64_t kShareOfExports = 2;  // of a device, that others may have mapped of a rank
constexpr uint64_t kForMessages = 8;     // such a part of it, where two ranks meet for messages

uint64_t lines_bytes(int ranks) {
  return 2 * static_cast<uint64_t>(ranks) * low_latency_bytes(ranks) * (kPieceLines / kPiece);
}

}  // namespace

Peers::Peers(ExportContext context, Place place)
    : context_(std::move(context)), rank_(context_.transport.rank()), place_(std::move(place)) {
  for (Rank rank = 0; rank < context_.transport.size(); ++rank)
    peers_.push_back({context_.area(rank)});
  for (Rank rank = 0; rank < size() && own().base() != nullptr; ++rank) {
    own().line(rank, kDoneLane) = own().line(rank, kTakenLane) = kAllDone;  // before they meet it
  }
}

void Peers::claim_blocks() {
  if (blocks_ > 0) return;  // a meeting that was refused may come again
  const int multiprocessors = api().facts(place_.device).multiprocessors;
  blocks_ = Residency::of_process().claim(own().info(0).uuid, multiprocessors, place_.most_blocks);
}

void Peers::keep_blocks(int count) {
  Residency::of_process().give_back(own().info(0).uuid, std::exchange(blocks_, count) - count);
}

Peers::~Peers() {
  if (blocks_ > 0) keep_blocks(0);
  try {
    const OnDevice here(api(), place_.device);
    let_go();
    bridge_.reset();
    for (auto& [info, memory] : memory_) {
      std::byte* mine = memory.of[static_cast<size_t>(rank_)];
      if (mine != nullptr) api().release(mine);
    }
    if (proof_ != nullptr) api().release_pinned(reinterpret_cast<std::byte*>(proof_));
    if (stream_ != nullptr) api().destroy_stream(stream_);
    for (const Peer& peer : peers_) {
      if (peer.device_area != nullptr) api().unregister_host(peer.area.base());
    }
  } catch (const std::exception&) {  // the driver may be shutting down
    return;
  }
}

void Peers::let_go() {
  const OnDevice here(api(), place_.device);
  for (Imports& imports : imports_) imports.give_back();
  for (auto& [info, memory] : memory_) {
    for (Rank rank = 0; rank < size(); ++rank) {
      std::byte*& theirs = memory.of[static_cast<size_t>(rank)];
      if (rank != rank_ && theirs != nullptr) {
        api().close_memory(std::exchange(theirs, nullptr));
      }
    }
  }
  for (int i = 0; i <= size(); ++i) {
    std::atomic<uint32_t>& step = own().info(i).step;
    if (step.load(std::memory_order_relaxed) != 0)
      step.store(kSteps + 1, std::memory_order_release);
  }
}

// ---- meeting

void Peers::bootstrap(const Subgroup& subgroup, uint32_t step) {
  RankInfo& info = this->info(subgroup, rank_);
  try {
    if (step == 1) prepare(info);
    if (step == 2) open(subgroup, info);
    if (step == 3) reach(subgroup, info);
    if (step == 4 && needs_bridge(subgroup))
      bridge_.emplace(context_).offer(api().facts(place_.device).node);
    if (step == 5 && needs_bridge(subgroup)) bridge_.value().open(), info.bridged = 1;
  } catch (const std::exception& error) {
    info.reaches.store(0, std::memory_order_relaxed);
    if (info.why[0] == '\0') std::strncpy(info.why, error.what(), sizeof info.why - 1);
  }
  info.step.store(step, std::memory_order_release);  // partner: ranks that meet
}

void Peers::prepare(RankInfo& info) {
  const DeviceFacts facts = api().facts(place_.device);
  info.uuid = salted(facts.uuid, api().salt);
  place_.neighbours.use_device(hash_of(info.uuid));
  info.memory_bytes = facts.memory_bytes;
  info.capability = facts.capability;
  info.most_bytes = place_.most_bytes;
  info.pattern = static_cast<uint64_t>(::getpid()) << 32 ^ reinterpret_cast<uint64_t>(&info);
  for (Peer& peer : peers_) {
    if (peer.area.base() == nullptr || peer.device_area != nullptr) continue;
    peer.device_area = api().register_host(peer.area.base(), Area::bytes(size()));
  }
  if (proof_ == nullptr) proof_ = reinterpret_cast<uint64_t*>(api().allocate_pinned(kPrologue));
  api().load_kernels();
  api().ids_change();  // tries it now, because mapping memory may wait for streams
  // Do streams write and wait for words of the host here? Nothing but a trial tells.
  if (stream_ == nullptr) stream_ = api().make_stream();
  const int spare = 2 * size() + 1;  // a timeline that nobody else uses
  api().write(stream_, word(rank_, &own().done(spare)), 1);
  api().wait_until(stream_, word(rank_, &own().done(spare)), 1);
  api().synchronize(stream_);
  if (own().done(spare).load(std::memory_order_seq_cst) != 1) {
    throw DeviceError("what a stream writes into shared memory does not arrive there");
  }
  info.usable = 1;
}

uint64_t Peers::bytes_of(const Subgroup& subgroup) const {
  uint64_t device = UINT64_MAX, most = UINT64_MAX;  // the smallest of all: rounds are shaped by it
  for (const Rank rank : subgroup.ranks) {
    const RankInfo& info = this->info(subgroup, rank);
    device = std::min(device, info.memory_bytes);
    if (info.most_bytes > 0) most = std::min(most, info.most_bytes);
  }
  const uint64_t fits = std::clamp(device / kShareOfDevice, kLeast, kMost);
  const uint64_t bytes = most == UINT64_MAX ? fits : most;
  return (subgroup.pair ? bytes / kForMessages : bytes) / 4096 * 4096;
}

bool Peers::own_devices(const Subgroup& subgroup) const {
  std::vector<Uuid> devices;
  for (const Rank rank : subgroup.ranks) devices.push_back(info(subgroup, rank).uuid);
  std::ranges::sort(devices);
  return std::ranges::adjacent_find(devices) == devices.end();
}

void Peers::open(const Subgroup& subgroup, RankInfo& info) {
  if (!place_.refusal.empty()) throw DeviceError(place_.refusal);
  for (const Rank rank : subgroup.ranks) {
    if (this->info(subgroup, rank).usable == 0) return;
  }
  SubgroupMemory& memory = memory_[subgroup.index_of(rank_)];
  if (!memory.of.empty()) api().release(memory.of[static_cast<size_t>(rank_)]);  // refused before
  memory.of.assign(peers_.size(), nullptr);
  memory.end = bytes_of(subgroup);
  memory.messages = subgroup.pair ? 0 : memory.end / 4 / 4096 * 3 * 4096;
  const bool own = !subgroup.pair && size() > 1 && own_devices(subgroup);
  if (own) memory.for_kernels = kRingBytes + 2 * kOneShotWindow + lines_bytes(size());
  allocate(memory, info);
  // Where processes take turns on a device, a kernel that waits for others wastes its turn.
  info.shared = place_.neighbours.shares_device(hash_of(info.uuid)) ? 1 : 0;
  if (own && info.shared == 0) claim_blocks();
  info.blocks = info.shared == 0 ? blocks_ : 0;
  info.window = api().export_memory(memory.of[static_cast<size_t>(rank_)]);
  info.reaches.store(1u << rank_, std::memory_order_relaxed);
}

// Its prologue is 0 but for the pattern, and so are the lines: flags that are none.
void Peers::allocate(SubgroupMemory& memory, RankInfo& info) {
  std::byte* const mine = api().allocate(kPrologue + memory.end + memory.for_kernels);
  auto* const proof = reinterpret_cast<std::byte*>(proof_);
  memory.of[static_cast<size_t>(rank_)] = mine;
  std::memset(proof, 0, kPrologue);
  api().copy(stream_, mine, proof, kPrologue);
  // The pattern comes as slots do later. Nothing but a trial tells whether it can.
  api().each_word(stream_, std::array{Word{mine, info.pattern, Word::kWrite64}});
  api().copy(stream_, proof, mine, sizeof(uint64_t));
  api().synchronize(stream_);
  if (std::exchange(*proof_, 0) != info.pattern)
    throw DeviceError("what a stream writes into its device's memory does not arrive there");
  const uint64_t lines = memory.for_kernels > 0 ? lines_bytes(size()) : 0;
  for (uint64_t done = 0; done < lines; done += kPrologue) {
    api().copy(stream_, memory.lines(rank_) + done, proof, std::min(kPrologue, lines - done));
  }
  api().synchronize(stream_);
}

void Peers::reach(const Subgroup& subgroup, RankInfo& info) {
  const auto entry = memory_.find(subgroup.index_of(rank_));
  if (entry == memory_.end()) return;
  uint32_t reaches = info.reaches.load(std::memory_order_relaxed);
  for (const Rank rank : subgroup.ranks) {
    const RankInfo& theirs = this->info(subgroup, rank);
    if (rank == rank_ || theirs.reaches.load(std::memory_order_relaxed) == 0) continue;
    std::byte*& memory = entry->second.of[static_cast<size_t>(rank)];
    memory = api().open_memory(theirs.window);
    info.seen[rank] = reinterpret_cast<uint64_t>(memory);
    if (api().nvlink(place_.device, theirs.uuid)) info.nvlinks.fetch_or(1u << rank);
    api().copy(stream_, reinterpret_cast<std::byte*>(proof_), memory, sizeof(uint64_t));
    api().synchronize(stream_);
    if (*proof_ != theirs.pattern) {
      throw DeviceError(str("what is mapped as rank ", rank, "'s memory is another's"));
    }
    reaches |= 1u << rank;
  }
  info.reaches.store(reaches, std::memory_order_relaxed);
}

// All ranks say the same, once all have tried to reach one another.
bool Peers::needs_bridge(const Subgroup& subgroup) const {
  bool reach = true, has_room = !subgroup.pair;
  uint32_t all = 0;
  for (const Rank rank : subgroup.ranks) all |= 1u << rank;
  for (const Rank rank : subgroup.ranks) {
    const RankInfo& info = this->info(subgroup, rank);
    reach = reach && (info.reaches.load(std::memory_order_relaxed) & all) == all;
    has_room = has_room && info.blocks > 0;
  }
  return has_room && !reach;
}

PeerAccess Peers::access(const Subgroup& subgroup) {
  PeerAccess access{.reach = true, .one_device = true, .own_devices = true, .why = {}};
  uint32_t all = 0;
  for (const Rank rank : subgroup.ranks) all |= 1u << rank;
  const Uuid first = info(subgroup, subgroup.ranks[0]).uuid;
  bool nvlink = true, bridged = true;
  int capability = INT_MAX, blocks = INT_MAX;
  for (const Rank rank : subgroup.ranks) {
    const RankInfo& info = this->info(subgroup, rank);
    if (info.usable == 0 || (info.reaches.load(std::memory_order_relaxed) & all) != all) {
      access.reach = false;
      if (access.why.empty() && info.why[0] != '\0')
        access.why = str("rank ", rank, ": ", info.why);
    }
    access.one_device = access.one_device && info.uuid == first;
    nvlink = nvlink && (info.nvlinks.load(std::memory_order_relaxed) | 1u << rank) == all;
    capability = std::min(capability, info.capability);
    blocks = std::min(blocks, info.blocks);
    access.shared = access.shared || info.shared != 0;
    bridged = bridged && info.bridged != 0;
  }
  access.own_devices = own_devices(subgroup);
  access.bridged = bridged && !subgroup.pair;
  if (!subgroup.pair && !bridged) bridge_.reset();
  if (!access.reach && !access.bridged) {
    if (!subgroup.pair && blocks_ > 0) keep_blocks(0);
    return access;
  }
  if (!subgroup.pair) {
    group_ = &memory_.at(0);
    group_->bridge = bridge_ ? &*bridge_ : nullptr;
    one_device_ = access.one_device;
    if (access.own_devices && blocks > 0)
      link_ = link_of(nvlink && access.reach, capability, blocks);
    if (blocks_ > 0) keep_blocks(link_ ? blocks : 0);
  }
  const uint64_t most = info(subgroup, rank_).memory_bytes / kShareOfExports;
  if (!exports_) exports_.emplace(context_, most);
  for (const Rank rank : subgroup.ranks) {
    const auto known = [&](const Imports& imports) { return imports.peer() == rank; };
    if (access.reach && rank != rank_ && std::ranges::none_of(imports_, known))
      imports_.emplace_back(context_, rank);
  }
  return access;
}

// ---- their memory, once they have met

std::byte* Peers::word(Rank of, const void* in_its_area) const {
  const auto* at = static_cast<const std::byte*>(in_its_area);
  return peer(of).device_area + (at - peer(of).area.base());
}

const SubgroupMemory& Peers::memory_with(Rank peer, bool messages) const {
  const auto pair = messages ? memory_.find(peer + 1) : memory_.end();
  return pair != memory_.end() ? pair->second : *group_;
}

Span Peers::region(Rank leader, bool messages) const {
  const SubgroupMemory& memory = memory_with(leader, messages);
  std::byte* const mine = memory.window(rank_);
  if (!messages) return {mine, memory.messages};
  const bool pair = &memory != group_;
  const uint64_t bytes = (memory.end - memory.messages) / (pair ? 1 : peers_.size()) / 512 * 512;
  return {mine + memory.messages + (pair ? 0 : static_cast<uint64_t>(leader) * bytes), bytes};
}

uint64_t Peers::seen_by(Rank leader, const std::byte* mine, bool messages) const {
  if (leader == rank_) return reinterpret_cast<uint64_t>(mine);
  const SubgroupMemory& memory = memory_with(leader, messages);
  const RankInfo& theirs = peer(leader).area.info(&memory == group_ ? 0 : 1 + rank_);
  return theirs.seen[rank_] + static_cast<uint64_t>(mine - memory.of[static_cast<size_t>(rank_)]);
}

LeaderSlot& Peers::slot_of(Rank leader, Rank from, bool messages) const {
  const Rank peer = leader == rank_ ? from : leader;
  return memory_with(peer, messages).prologue(from).slots[messages ? 1 : 0][leader];
}

}  // namespace ringcomm::cuda
