#include "torch/window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <ATen/ATen.h>

#include "torch/errors.h"

namespace ringcomm {
namespace {

constexpr const char* kName = "ringcomm.Window: ";

Window::WorkPtr ended() { return c10::make_intrusive<Works>(std::vector<Window::WorkPtr>()); }

}  // namespace

c10::intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor>& tensor) {
  auto window = c10::make_intrusive<Window>(c10::intrusive_ptr<Backend>::reclaim_copy(this));
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}

Window::Window(c10::intrusive_ptr<Backend> backend)
    : backend_(std::move(backend)), group_(backend_->group()) {}

Window::~Window() { close(false); }

// ---- registration

// `own` in, and everybody's out.
std::vector<Window::Part> Window::exchange(const Part& own) const {
  const int64_t words = static_cast<int64_t>(kPartWords);
  at::Tensor input = at::empty({words}, at::kLong),
             all = at::empty({group_->size() * words}, at::kLong);
  std::memcpy(input.data_ptr(), &own, sizeof own);
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  without_gil([&] {
    if (const auto work = backend_->_allgather_base(all, input, options)) work->wait();
  });
  std::vector<Part> parts(static_cast<size_t>(group_->size()));
  std::memcpy(parts.data(), all.const_data_ptr(), parts.size() * sizeof(Part));
  return parts;
}

void Window::tensor_register(const at::Tensor& tensor, bool owning) {
  TORCH_CHECK(parts_.empty(), kName, "it has a tensor already: call tensor_deregister() first");
  TORCH_CHECK(tensor.defined() && tensor.is_cpu() && tensor.is_contiguous(), kName,
              "tensor_register needs a contiguous tensor on the CPU");
  TORCH_CHECK(backend_->group() == group_, kName,
              "its group was reconfigured: make a new window there");
  const Span span = span_of(tensor);
  const std::span<std::byte> arena = group_->state().transport().arena(group_->rank());
  const bool inside = !arena.empty() && span.data >= arena.data() &&
                      span.data + span.bytes <= arena.data() + arena.size();
  const auto place = inside ? static_cast<uint64_t>(span.data - arena.data()) + 1 : 0;
  // Before the ranks meet: then a put may come at once.
  const uint32_t tag = group_->messages().open_window(span);
  try {
    auto parts = exchange({tag, span.bytes, static_cast<uint64_t>(tensor.scalar_type()), place});
    const auto other = std::ranges::find_if(parts, [&](const Part& it) { return it.tag != tag; });
    TORCH_CHECK(other == parts.end(), kName, "it is the window ", tag - kWindowTags,
                " of this rank's, and another one of rank ", other - parts.begin(),
                "'s: all ranks must register their windows in the same order");
    const auto types = static_cast<uint64_t>(at::ScalarType::NumOptions);
    TORCH_CHECK(std::ranges::all_of(parts, [&](const Part& it) { return it.type < types; }), kName,
                "a rank has a type that this one's torch does not know: install the same torch");
    parts_ = std::move(parts);
  } catch (const std::exception&) {
    group_->messages().close_window(tag, false);
    throw;
  }
  sizes_ = tensor.sizes().vec();
  data_ = span.data;
  if (owning) tensor_ = tensor;
  const Lock lock(mutex_);
  put_bytes_.assign(parts_.size(), 0);
}

// Nobody writes here any more once this rank has all bytes that the others have put.
void Window::tensor_deregister() {
  TORCH_CHECK(!parts_.empty(), kName, "it has no tensor: call tensor_register() first");
  await_own_puts();
  at::Tensor sent = at::empty({group_->size()}, at::kLong), told = at::empty_like(sent);
  {
    const Lock lock(mutex_);
    std::memcpy(sent.data_ptr(), put_bytes_.data(), bytes_of(sent));
  }
  std::vector<int64_t> even_in, even_out;
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  const auto* const bytes = told.const_data_ptr<int64_t>();
  const Deadline deadline(group_->state().timeout());
  const auto over = [&] {
    for (Rank peer = 0; peer < group_->size(); ++peer) {
      if (!has_all(peer, static_cast<uint64_t>(bytes[peer]), deadline)) return false;
    }
    return true;
  };
  without_gil([&] {
    if (const auto work = backend_->alltoall_base(told, sent, even_out, even_in, options))
      work->wait();
    with_torch_errors([&] { group_->progress().wait_for_streams("tensor_deregister", over); });
  });
  close(true);
}

// Tells whether so many bytes of that peer's puts have come. Throws where they never will.
bool Window::has_all(Rank peer, uint64_t bytes, const Deadline& deadline) const {
  const auto tag = static_cast<uint32_t>(parts_[0].tag);
  const auto complete = [&] { return group_->messages().put_by(peer, tag) >= bytes; };
  if (complete()) return true;
  GroupState& state = group_->state();
  if (const auto why = state.why_failed()) std::rethrow_exception(why);
  Transport& transport = state.transport();
  const bool gone = transport.state(peer, Board::kHost).left || transport.connection_lost(peer);
  if (gone && transport.stream_available(peer) == 0 && !complete())
    throw PeerError(peer, str("tensor_deregister: ", state.diagnosis().told_by(peer)));
  if (deadline.passed())
    throw timed_out("tensor_deregister", deadline, str("the puts of rank ", peer));
  return false;
}

void Window::close(bool deregistered) {
  if (parts_.empty()) return;
  if (!group_->state().forked()) {  // else it is the parent's, whose threads may hold the lock
    const auto tag = static_cast<uint32_t>(parts_[0].tag);
    without_gil([&] { group_->messages().close_window(tag, deregistered); });
  }
  parts_.clear();
  tensor_.reset();
  own_signals_ = 0;
}

// ---- puts

const Window::Part& Window::part(const char* asked, int64_t rank) const {
  TORCH_CHECK(!parts_.empty(), kName, asked, ": no tensor is registered: call tensor_register()");
  TORCH_CHECK_INDEX(rank >= 0 && rank < group_->size(), kName, asked, ": the group of ",
                    group_->size(), " has no rank ", rank);
  TORCH_CHECK(backend_->group() == group_, kName, asked,
              ": its group was reconfigured: make a new window there");
  with_torch_errors([&] { group_->state().check_usable(); });  // nor in a forked child
  return parts_[static_cast<size_t>(rank)];
}

std::byte* Window::mapped(int64_t rank) const {
  const Part& there = parts_[static_cast<size_t>(rank)];
  const auto arena = group_->state().transport().arena(static_cast<Rank>(rank));
  if (there.place == 0 || there.place > arena.size()) return nullptr;
  const uint64_t at = there.place - 1;
  return there.bytes <= arena.size() - at ? arena.data() + at : nullptr;
}

void Window::check_put(const at::Tensor& tensor, int64_t peer, int64_t offset) const {
  const Part& there = part("put", peer);
  TORCH_CHECK(tensor.defined() && tensor.is_cpu() && tensor.is_contiguous(), kName,
              "put needs a contiguous tensor on the CPU");
  const auto type = static_cast<at::ScalarType>(there.type);
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, kName, "put of ", tensor.scalar_type(),
                   " into the window of rank ", peer, ", which holds ", type);
  const auto room = static_cast<int64_t>(there.bytes / tensor.itemsize());
  TORCH_CHECK_INDEX(offset >= 0 && tensor.numel() <= room && offset <= room - tensor.numel(), kName,
                    "put of ", tensor.numel(), " elements at ", offset, ": the window of rank ",
                    peer, " has ", room);
}

Window::WorkPtr Window::put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
                            const c10d::PutOptions& options) {
  check_put(tensor, peer, offset);
  if (tensor.numel() == 0) return ended();
  const uint64_t at = static_cast<uint64_t>(offset) * tensor.itemsize();
  std::byte* const there = peer == group_->rank() ? data_ : mapped(peer);
  if (there == nullptr) return message("put", true, peer, tensor, at, async, options.timeout);
  with_torch_errors([&] {
    GroupState& state = group_->state();
    const auto rank = static_cast<Rank>(peer);
    const PeerState theirs = state.transport().state(rank, Board::kHost);
    if (theirs.failed || theirs.left)
      throw PeerError(rank, str("put to rank ", rank, ": ", state.diagnosis().told_by(rank)));
  });
  const Span from = span_of(tensor);
  without_gil([&] { std::memmove(there + at, from.data, from.bytes); });
  return ended();
}

// ---- signals

Window::WorkPtr Window::signal(int64_t peer, bool async, const c10d::SignalOptions& options) {
  part("signal", peer);
  if (peer == group_->rank()) return own_signal(true);
  return message("signal", true, peer, {}, std::nullopt, async, options.timeout);
}

Window::WorkPtr Window::wait_signal(int64_t peer, bool async,
                                    const c10d::WaitSignalOptions& options) {
  part("wait_signal", peer);
  if (peer == group_->rank()) return own_signal(false);
  return message("wait_signal", false, peer, {}, std::nullopt, async, options.timeout);
}

Window::WorkPtr Window::own_signal(bool sending) {
  if (sending) {
    ++own_signals_;
  } else if (own_signals_.fetch_sub(1) <= 0) {
    ++own_signals_;
    TORCH_CHECK(false, kName, "wait_signal: rank ", group_->rank(),
                " would wait for its own signal, which it has not given");
  }
  return ended();
}

Window::WorkPtr Window::message(const char* asked, bool sending, int64_t peer,
                                const at::Tensor& tensor, std::optional<uint64_t> into, bool async,
                                std::chrono::milliseconds timeout) {
  Call call(sending ? c10d::OpType::SEND : c10d::OpType::RECV, Collective::kBarrier, asked);
  call.name = asked;
  call.peer = static_cast<Rank>(peer);
  call.tag = static_cast<uint32_t>(parts_[0].tag);
  call.into = into;
  call.operation.timeout = timeout;
  if (tensor.defined()) {
    call.lists = {tensor};
    call.inputs = call.lists;
    set_moved_type(call, call.inputs);
    add_inputs(call, call.inputs);
  } else {
    (sending ? call.operation.input : call.operation.output) = {Span{}};
  }
  WorkPtr work;
  without_gil([&] {
    work = backend_->issue(std::move(call));
    if (into) note_put(work, peer, bytes_of(tensor));
    if (!async) work->wait();
  });
  return work;
}

// One that has ended may be gone.
void Window::note_put(const WorkPtr& work, int64_t peer, uint64_t bytes) {
  const Lock lock(mutex_);
  std::erase_if(puts_, [](const auto& put) { return put.expired(); });
  puts_.emplace_back(work);
  put_bytes_[static_cast<size_t>(peer)] += bytes;
}

void Window::await_own_puts() {
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> puts;
  {
    const Lock lock(mutex_);
    puts.swap(puts_);
  }
  without_gil([&] {
    for (const auto& put : puts) {
      if (const WorkPtr work = put.lock()) work->wait();
    }
  });
}

// ---- views

at::Tensor Window::map_remote_tensor(int64_t rank) {
  const Part& there = part("map_remote_tensor", rank);
  if (rank == group_->rank() && tensor_) return *tensor_;
  std::byte* const data = rank == group_->rank() ? data_ : mapped(rank);
  TORCH_CHECK(data != nullptr, kName, "map_remote_tensor: rank ", rank,
              "'s tensor is not mapped here: it has to come from ringcomm.empty(), on this host");
  const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(there.type));
  const auto count = static_cast<int64_t>(there.bytes / options.dtype().itemsize());
  const bool alike = count == c10::multiply_integers(sizes_);
  const auto kept = c10::intrusive_ptr<Window>::reclaim_copy(this);  // and with it the mapping
  return at::from_blob(
      data, alike ? sizes_ : std::vector<int64_t>{count}, [kept](void*) {}, options);
}

c10d::WindowAttr Window::get_attr(int64_t rank) {
  part("get_attr", rank);
  const bool seen = rank == group_->rank() || mapped(rank) != nullptr;
  return {seen ? c10d::WindowAccessType::UNIFIED : c10d::WindowAccessType::SEPARATE};
}

}  // namespace ringcomm

#endif
