#include "plan/registry.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

namespace ringcomm {
namespace {

constexpr uint64_t kPlaces = 256 - kFirstRegistered;

struct Registered {
  std::string name;
  std::vector<Collective> collectives;
  Author author;
};

// Entries stay as they are from then on.
struct Registry {
  std::mutex mutex;
  std::array<std::unique_ptr<const Registered>, kPlaces> places;
};

Registry& registry() {
  static Registry& all = *new Registry;  // threads may plan while the program ends
  return all;
}

uint64_t place_of(const std::string& name) {
  uint64_t hash = 0;
  for (const char c : name) hash = mix(hash, static_cast<uint64_t>(c));
  return hash % kPlaces;
}

const Registered* find(Algorithm algorithm) {
  if (!is_registered(algorithm)) return nullptr;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.places[static_cast<size_t>(algorithm) - kFirstRegistered].get();
}

}  // namespace

Algorithm register_algorithm(const std::string& name, std::vector<Collective> collectives,
                             Author author) {
  RINGCOMM_CHECK(std::ranges::count(algorithm_names(), name) == 0, "ringcomm has an algorithm '",
                 name, "' of its own: give this one another name");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& place = all.places[place_of(name)];
  RINGCOMM_CHECK(!place || place->name != name, "the algorithm '", name,
                 "' is registered already: give this one another name");
  RINGCOMM_CHECK(!place, "'", name, "' has the number of '", place->name,
                 "', which is registered already: give one of them another name");
  place = std::make_unique<const Registered>(
      Registered{name, std::move(collectives), std::move(author)});
  return static_cast<Algorithm>(kFirstRegistered + place_of(name));
}

bool serves(Algorithm registered, Collective collective) {
  const Registered* const entry = find(registered);
  return entry && std::ranges::count(entry->collectives, collective) > 0;
}

const char* registered_name(Algorithm algorithm) {
  const Registered* const entry = find(algorithm);
  return entry ? entry->name.c_str() : "unknown";
}

std::optional<Algorithm> registered_called(const std::string& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto& place = all.places[place_of(name)];
  if (!place || place->name != name) return std::nullopt;
  return static_cast<Algorithm>(kFirstRegistered + place_of(name));
}

Plan registered_plan(const Shape& shape, Rank rank, Algorithm algorithm) {
  const Registered* const entry = find(algorithm);
  RINGCOMM_CHECK(entry && serves(algorithm, shape.collective), to_string(shape.collective),
                 " has no algorithm \"", registered_name(algorithm), "\"");
  return scripted_plan(shape, rank, algorithm, entry->author(shape, rank));
}

}  // namespace ringcomm
