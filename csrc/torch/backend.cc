#include "torch/backend.h"

#include <torch/csrc/utils/pybind.h>

#include "torch/errors.h"
#include "torch/store_adapter.h"

namespace ringcomm {

constexpr auto kGrace = std::chrono::seconds(1);  // destroy returns within two

// Python's signal handlers run on its main thread alone, between its own instructions. While that
// thread waits here, this calls them. Their exception (Ctrl-C) goes on as Python's.
void run_signal_handlers() {
  if (::gettid() != ::getpid() || !Py_IsInitialized()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

uint32_t line_of_caller() {
  if (!Py_IsInitialized()) return 0;
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("ringcomm._runtime.lines")
      .attr("number_of_caller")()
      .cast<uint32_t>();
}

void without_gil(const std::function<void()>& call) {
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  call();
}

CommunicatorOptions wanted_of(const ringcomm::Options& options, RankAndSize self) {
  CommunicatorOptions wanted;
  wanted.rank = self.rank;
  wanted.size = self.size;
  if (!options.group_name.empty()) wanted.name = options.group_name;
  const auto& global = options.global_ranks_in_group;
  if (global.size() == static_cast<size_t>(self.size))
    wanted.global_ranks = {global.begin(), global.end()};
  wanted.timeout = checked_timeout(options.timeout);
  wanted.config = options.config;
  wanted.interrupt = run_signal_handlers;
  if (options.enable_reconfigure) wanted.unusable = "' is not connected (reconfigure it): ";
  return wanted;
}

// ---- life

void Backend::begin_life(std::shared_ptr<Communicator> group) {
  auto state = std::make_shared<BackendState>();
  state->group = std::move(group);
  state->hooks = hooks_;
  state->meant = state->group->state().failed();  // it waits for its first reconfiguration
  place_ = {state->group->rank(), state->group->size()};
  BackendStates::get().add(state);
  life_ = std::move(state);
}

c10::intrusive_ptr<Backend> Backend::create(const StorePtr& store, RankAndSize self,
                                            GroupOptionsPtr options, bool waits) {
  // Until it is reconfigured, a rank is alone and takes no calls.
  waits = waits || options->enable_reconfigure;
  CommunicatorOptions wanted = wanted_of(*options, waits ? RankAndSize{0, 1} : self);
  wanted.may_be_late = true;
  if (options->check_members) {
    wanted.interrupt_meeting = [check = std::exchange(options->check_members, nullptr)] {
      run_signal_handlers();
      check();
    };
  }
  const auto own = options->links ? options->links->store(self.rank) : nullptr;
  StoreAdapter adapter(store);
  auto group =
      with_torch_errors([&] { return Communicator::create(own ? *own : adapter, wanted); });
  if (waits) group->abort("no reconfigure() has been called yet");
  auto backend = c10::make_intrusive<Backend>(std::move(group), self, std::move(options), store);
  backend->revoked_ = waits;
  return backend;
}

Backend::Backend(std::shared_ptr<Communicator> group, RankAndSize self, GroupOptionsPtr options,
                 StorePtr store)
    : c10d::Backend(self.rank, self.size),
      options_(std::move(options)),
      split_child_(BackendPtr()),
      card_(Process::get().neighbours().card()),
      store_(std::move(store)) {
  begin_life(std::move(group));
  init();
}

// Operations may end in Python callbacks on the worker: it must get the GIL while we wait for it.
void Backend::leave(bool drains) {
  without_gil([&] { group()->shutdown(kGrace, drains); });
}

Backend::~Backend() {
  try {
    leave();
    Workers::get().deferred().clear();
  } catch (const std::exception& error) {
    TORCH_WARN("ringcomm: leaving a group failed: ", error.what());
  }
}

Backend::OptionsPtr Backend::getBackendOptions() {
  auto copy = c10::make_intrusive<ringcomm::Options>(*options_);  // torch changes what it gets
  copy->timeout = group()->state().timeout();
  return copy;
}

std::chrono::milliseconds Backend::timeout_of(std::chrono::milliseconds asked,
                                              const GroupState& state) {
  const bool unset = asked == c10d::kUnsetTimeout || asked == kNoTimeout;
  const auto base = unset ? state.timeout() : checked_timeout(asked);
  const int64_t more =
      extension_ms_.load(std::memory_order_relaxed) == 0 ? 0 : extension_ms_.exchange(0);
  return checked_timeout(base + std::chrono::milliseconds(more));
}

c10d::ErrorType Backend::getError() {
  const std::exception_ptr error = group()->state().error();
  if (!error || revoked_) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const PeerError& peer) {
    return peer.rank() == rank() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::abort() {
  ++aborts_;
  if (options_->enable_reconfigure && !group()->state().failed()) revoked_ = life()->meant = true;
  group()->abort("abort() was called");
}

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(!hasHooks(), "ringcomm: the group has a completion hook already");
  onCompletionHook_ = std::move(hook);
  hooks_->ended = onCompletionHook_;
}

// torch takes its hooks away next. An elastic world does not wait for what they write.
void Backend::close(bool drains) {
  if (!options_->links) without_gil([&] { life()->tell_failure(); });
  without_gil([&] { group()->device().wait_for_all(); });
  leave(drains);
  Workers::get().deferred().clear();
}

// Makes the options of a group of some of this one's ranks.
GroupOptionsPtr Backend::options_of(const std::vector<int>& ranks, const OptionsPtr& opts) const {
  const pybind11::gil_scoped_acquire gil;
  const auto made = pybind11::module_::import("ringcomm._runtime.options")
                        .attr("of_some")(pybind11::cast(options_), ranks, pybind11::cast(opts));
  const auto options = made.cast<GroupOptionsPtr>();
  options->group_name = opts->group_name;
  options->group_desc = opts->group_desc;  // which Python does not see
  return options;
}

// torch calls this once per device type of the group, with one store for both, and uses the first
// child that it gets.
BackendPtr Backend::split(const StorePtr& store, const std::vector<int>& ranks,
                          const OptionsPtr& opts) {
  const auto self = std::find(ranks.begin(), ranks.end(), rank());
  if (self == ranks.end()) return nullptr;
  const Lock lock(split_mutex_);
  if (split_store_ == store) {
    if (auto child = split_child_.lock()) return child;
  }
  const RankAndSize there{static_cast<Rank>(self - ranks.begin()), static_cast<int>(ranks.size())};
  auto child = create(store, there, options_of(ranks, opts));
  split_store_ = store;
  split_child_ = c10::weak_intrusive_ptr<c10d::Backend>(child);
  ++splits_;
  return child;
}

// ---- several calls as one

// Returns null where this thread has begun none.
Backend::Batch* Backend::own_batch() {
  const Lock lock(batches_mutex_);
  const auto own = batches_.find(std::this_thread::get_id());
  return own == batches_.end() ? nullptr : &own->second;  // which no other thread touches
}

Backend::Batch Backend::take_batch() {
  const Lock lock(batches_mutex_);
  auto taken = batches_.extract(std::this_thread::get_id());
  return taken ? std::move(taken.mapped()) : Batch();
}

void Backend::startCoalescing() {
  forget_batch();
  const Lock lock(batches_mutex_);
  batches_[std::this_thread::get_id()];
}

void Backend::collect(const WorkPtr& work) {
  if (Batch* const batch = own_batch()) batch->works.push_back(work);
}

Backend::WorkPtr Backend::endCoalescing() {
  Batch batch = take_batch();
  start(batch);
  if (batch.works.empty()) return nullptr;
  return c10::make_intrusive<Works>(std::move(batch.works));
}

}  // namespace ringcomm
