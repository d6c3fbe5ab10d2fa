// torch's Window, from 2.14 on: memory of each rank into which the others put tensors, at times
// that they choose. A signal tells a peer that what was put before is there.
//
// On the same host, a put into a tensor from ringcomm.empty() is one copy. Else it is a message
// that the peer's worker takes in (message/mailbox.h), whatever the peer's program does.
#pragma once

#include "torch/backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW

namespace ringcomm {

class Window final : public c10d::Window {
 public:
  using WorkPtr = Backend::WorkPtr;

  explicit Window(c10::intrusive_ptr<Backend> backend);
  ~Window() override;

  // All ranks call these two together, in the same order as their other collectives.
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;

  // Ends when the tensor may be written again. The peer has it once it has a later signal.
  WorkPtr put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
              const c10d::PutOptions& options) override;
  WorkPtr signal(int64_t peer, bool async, const c10d::SignalOptions& options) override;
  // Ends with a signal of that peer's that no other wait_signal has taken.
  WorkPtr wait_signal(int64_t peer, bool async, const c10d::WaitSignalOptions& options) override;

  // Returns this rank's tensor, or a view of a peer's that this process has mapped.
  at::Tensor map_remote_tensor(int64_t rank) override;
  // UNIFIED where there is such a view.
  c10d::WindowAttr get_attr(int64_t rank) override;

 private:
  // As the ranks tell one another.
  struct Part {
    uint64_t tag, bytes, type;
    uint64_t place;  // in the arena of its process, from 1 on; 0: it is elsewhere
  };
  static constexpr size_t kPartWords = sizeof(Part) / sizeof(uint64_t);

  std::vector<Part> exchange(const Part& own) const;
  const Part& part(const char* asked, int64_t rank) const;
  std::byte* mapped(int64_t rank) const;  // null: it is not
  void check_put(const at::Tensor& tensor, int64_t peer, int64_t offset) const;
  WorkPtr message(const char* asked, bool sending, int64_t peer, const at::Tensor& tensor,
                  std::optional<uint64_t> into, bool async, std::chrono::milliseconds timeout);
  WorkPtr own_signal(bool sending);
  void note_put(const WorkPtr& work, int64_t peer, uint64_t bytes);
  void await_own_puts();
  bool has_all(Rank peer, uint64_t bytes, const Deadline& deadline) const;
  void close(bool deregistered);

  const c10::intrusive_ptr<Backend> backend_;
  const std::shared_ptr<Communicator> group_;  // of the life that it was made in
  std::vector<Part> parts_;                    // empty: nothing is registered
  std::optional<at::Tensor> tensor_;           // if the window keeps it
  std::vector<int64_t> sizes_;                 // of this rank's tensor
  std::byte* data_ = nullptr;
  std::atomic<int64_t> own_signals_{0};

  Mutex mutex_;
  // Those that may not have ended. A message keeps its Work until then.
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> puts_ RINGCOMM_GUARDED_BY(mutex_);
  std::vector<uint64_t> put_bytes_ RINGCOMM_GUARDED_BY(mutex_);  // by messages, to each peer
};

}  // namespace ringcomm

#endif
