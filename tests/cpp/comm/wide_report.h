// The output of the program `wide`: one object of JSON, with the median and the most of all ranks.
#pragma once

#include <algorithm>
#include <map>
#include <set>

#include "cpp/comm/wide_board.h"
#include "cpp/comm/wide_options.h"

namespace ringcomm::testing {

inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return out + '"';
}

template <typename Number>
std::string median_and_most(std::vector<Number> some) {
  if (some.empty()) return "null";
  std::ranges::sort(some);
  std::ostringstream out;
  out.precision(12);
  out << "{\"median\": " << some[some.size() / 2] << ", \"most\": " << some.back() << "}";
  return out.str();
}

class Report {
 public:
  Report(const WideOptions& options, Board& board) : options_(options), board_(board) {}

  // How each rank's process ended, in words; "" where it ended as it should.
  std::string text(const std::vector<std::string>& ends) {
    std::map<std::string, std::vector<Rank>> errors, heard;
    bool good = true;
    for (Rank rank = 0; rank < options_.ranks; ++rank) {
      const Seat& seat = board_.seat(rank);
      const std::string& end = ends[static_cast<size_t>(rank)];
      if (*seat.heard != '\0') heard[seat.heard].push_back(rank);
      if (end.empty()) continue;
      good = false;
      errors[*seat.error == '\0' ? str(end, " while it ", seat.doing) : seat.error].push_back(rank);
    }
    if (errors.size() > 1) errors.erase("another rank has failed");
    return str("{\"ranks\": ", options_.ranks, ", \"ok\": ", good ? "true" : "false",
               ", \"errors\": ", texts(errors), ", \"heard\": ", texts(heard),
               ", \"heard_after\": ", of_all(&Seat::heard_after),
               ", \"left_after\": ", of_all(&Seat::left_after),
               ", \"longest\": ", of_all(&Seat::longest), ", \"total\": ", of_all(&Seat::total),
               ", \"count\": ", of_all(&Seat::count), ", \"loops\": ", loops(),
               ", \"stages\": ", stages(), "}");
  }

 private:
  static std::string texts(const std::map<std::string, std::vector<Rank>>& by_text) {
    const auto in_json = [](const auto& pair) {
      return str("{\"text\": ", quoted(pair.first), ", \"ranks\": [", joined(pair.second), "]}");
    };
    return "[" + joined(by_text, in_json) + "]";
  }

  std::string of_all(double Seat::* what) {
    std::vector<double> some;
    for (Rank rank = 0; rank < options_.ranks; ++rank) some.push_back(board_.seat(rank).*what);
    return median_and_most(some);
  }
  std::string loops() {
    std::vector<int> some;
    for (Rank rank = 0; rank < options_.ranks; ++rank) some.push_back(board_.seat(rank).loops);
    return median_and_most(some);
  }

  std::string stages() {
    std::string all;
    for (int number = 0;; ++number) {
      std::vector<Footprint> some;
      for (Rank rank = 0; rank < options_.ranks; ++rank) {
        const Seat& seat = board_.seat(rank);
        if (seat.stages > number) some.push_back(seat.footprints[static_cast<size_t>(number)]);
      }
      if (some.empty()) return "[" + all + "]";
      all += str(all.empty() ? "" : ", ", stage(some));
    }
  }

  static std::string stage(const std::vector<Footprint>& some) {
    std::vector<double> batches;
    for (size_t batch = 0; batch < Footprint::kBatches && some[0].end[batch] > 0; ++batch) {
      const auto last = [&](auto what) {
        double latest = 0;
        for (const Footprint& footprint : some) latest = std::max(latest, (footprint.*what)[batch]);
        return latest;
      };
      // From when the last rank has begun until the last has ended.
      batches.push_back((last(&Footprint::end) - last(&Footprint::begin)) / some[0].calls);
    }
    std::ranges::sort(batches);
    std::ostringstream out;
    out.precision(12);
    out << "{\"name\": " << quoted(some[0].name) << ", \"algorithm\": " << quoted(some[0].algorithm)
        << ", \"ranks\": " << some.size() << ", \"seconds\": " << batches[batches.size() / 2];
    const auto add = [&](const char* name, uint64_t Footprint::* what) {
      std::vector<uint64_t> values;
      for (const Footprint& footprint : some) values.push_back(footprint.*what);
      out << ", \"" << name << "\": " << median_and_most(values);
    };
    add("vm_bytes", &Footprint::vm_bytes);
    add("rss_bytes", &Footprint::rss_bytes);
    add("pss_bytes", &Footprint::pss_bytes);
    add("descriptors", &Footprint::descriptors);
    add("mappings", &Footprint::mappings);
    add("threads", &Footprint::threads);
    add("connections", &Footprint::connections);
    add("requests", &Footprint::requests);
    add("store_bytes", &Footprint::store_bytes);
    add("switches", &Footprint::switches);
    out << "}";
    return out.str();
  }

  const WideOptions& options_;
  Board& board_;
};

}  // namespace ringcomm::testing
