#include "torch/hooks.h"

#include <c10/util/Exception.h>

namespace ringcomm {

void warn_of_hook(const std::exception& error) {
  TORCH_WARN("ringcomm: a hook that was registered with the group failed: ", error.what());
}

}  // namespace ringcomm
