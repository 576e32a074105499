// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_passes.hpp"

#include <algorithm>

namespace longscan {

template <class T>
void DeltaPasses<T>::begin(const DeltaInputs& in, const DeltaOutputs& out, std::int64_t tokens) {
  in_ = in, out_ = out, tokens_ = tokens;
  tensor_tasks_ = general_tasks_ = tasks_ahead_ = 0;
  tasks_.restart();
  tensor_side_by_side_ = 0;
  if constexpr (sizeof(T) == 4) {
    const DeltaPass<T> pass = describe(rules(static_cast<bool>(out_.o), false));
    if (tensor_.applies(pass)) tensor_side_by_side_ = DeltaTensor::side_by_side(pass);
  }
}

template <class T>
DeltaRules DeltaPasses<T>::rules(bool outputs, bool map) const {
  DeltaRules r;
  r.chunk = options_.chunk, r.d_key = shape_.d_key, r.d_value = shape_.d_value;
  r.dplr = options_.variant == Variant::dplr, r.undecayed = options_.erase == Erase::undecayed;
  r.channel_decay = shape_.channel_decay && in_.log_decay, r.normalize_keys = options_.normalize_keys;
  r.round_to_bf16 = options_.precision == Precision::bf16 &&
                    (size_of(in_.k.type) > 2 || size_of(in_.v.type) > 2 || (in_.q && size_of(in_.q.type) > 2));
  r.half_operands = options_.precision == Precision::bf16;
  r.outputs = outputs, r.map = map, r.inverse = options_.inverse, r.scale = options_.scale;
  return r;
}

template <class T>
DeltaPass<T> DeltaPasses<T>::describe(const DeltaRules& rules) const {
  DeltaPass<T> pass;
  pass.rules = rules;
  pass.in = {in_.q, in_.k, in_.v, in_.beta, in_.eta, in_.log_decay, in_.a, in_.b};
  pass.heads = shape_.heads, pass.tokens = tokens_;
  if (rules.outputs) {
    pass.out = out_.o;
    pass.state_every = options_.state_every, pass.states = static_cast<T*>(out_.states);
  }
  return pass;
}

template <class T>
int DeltaPasses<T>::side_by_side() const {
  return on_tensor_cores() ? tensor_side_by_side_ : delta_side_by_side(space_);
}

template <class T>
int DeltaPasses<T>::most_side_by_side() const {
  const int general = delta_side_by_side(space_);
  if constexpr (sizeof(T) == 4) {
    const DeltaPass<T> pass = describe(rules(true, false));
    if (pass.rules.half_operands) return std::max(general, DeltaTensor::side_by_side(pass));
  }
  return general;
}

template <class T>
PassSummary DeltaPasses<T>::run(const std::vector<Task>& tasks, const DeltaRules& rules,
                                const std::function<void()>& then) {
  if constexpr (sizeof(T) == 4) {
    const DeltaPass<T> pass = describe(rules);
    if (!tasks.empty() && tensor_.applies(pass)) {
      tensor_.launch(space_, pass, tasks);
      then();
      const std::vector<char> rejected = tensor_.rejected(space_);  // waits: the host needs to know
      std::vector<Task> again;
      for (std::size_t i = 0; i < tasks.size(); ++i)
        if (rejected[i]) again.push_back(tasks[i]);
      tensor_tasks_ += static_cast<std::int64_t>(tasks.size() - again.size());
      PassSummary summary = general_run(again, rules, then);
      if (rules.count_breaches) summary.breaches += tensor_.breaches();
      return summary;
    }
  }
  return general_run(tasks, rules, then);
}

template <class T>
void DeltaPasses<T>::run_ahead(const std::vector<Task>& tasks, const DeltaRules& rules) {
  tasks_ahead_ = 0;
  if constexpr (sizeof(T) == 4) {
    const DeltaPass<T> pass = describe(rules);
    if (on_tensor_cores() && !tasks.empty() && ahead_.applies(pass)) {  // as outputs, whose rounding it has
      ahead_.launch(space_, pass, tasks, false);                        // a wrong state is found at its border
      tasks_ahead_ = static_cast<std::int64_t>(tasks.size());
      return;
    }
  }
  general_run(tasks, rules);
}

template <class T>
bool DeltaPasses<T>::settled() {
  if (tasks_ahead_ == 0) return true;
  const std::vector<char> rejected = ahead_.rejected(space_);
  const auto kept = std::count(rejected.begin(), rejected.end(), 0);
  tensor_tasks_ += kept;
  const bool all = kept == tasks_ahead_;
  tasks_ahead_ = 0;
  return all;
}

template <class T>
PassSummary DeltaPasses<T>::general_run(const std::vector<Task>& tasks, const DeltaRules& rules,
                                        const std::function<void()>& then) {
  PassSummary summary;
  if (tasks.empty()) return summary;
  const auto n = static_cast<std::int64_t>(tasks.size());
  reserve(counts_, "longscan::delta::counts", n);
  DeltaPass<T> pass = describe(rules);
  pass.tasks = tasks_(space_, tasks), pass.task_count = n, pass.counts = counts_.data();
  delta_pass(space_, pass);
  then();
  found_.fetch(space_, counts_.data(), n);
  space_.fence();
  general_tasks_ += n;
  const Task* worst = nullptr;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const DeltaCounts& c = found_[static_cast<std::int64_t>(i)];
    summary.breaches += c.breaches, summary.fallbacks += c.fallbacks;
    summary.terms = std::max<std::int64_t>(summary.terms, c.terms);
    if (c.first_bad >= 0) summary.all_bad.push_back({c.first_bad, tasks[i].head});
    if (c.first_bad >= 0 && (!worst || c.first_bad < summary.bad.token)) {
      worst = &tasks[i];
      summary.bad = {c.first_bad, tasks[i].head};
    }
  }
  if (worst && rules.chunk > 1) summary.bad = locate(*worst, summary.bad.token);
  return summary;
}

/// The first bad token of a task whose chunk at `chunk_begin` has one: that chunk again, token by token.
template <class T>
BadToken DeltaPasses<T>::locate(const Task& task, std::int64_t chunk_begin) {
  const DeltaOutputs kept = out_;
  out_ = {};  // nothing is to be written
  DeviceArray<T> before("longscan::delta::locate", slots_.state_size);
  DeltaRules r = rules(false, false);
  Task to_chunk = task;
  to_chunk.end = chunk_begin, to_chunk.to = slots_.state(before, 0), to_chunk.probe_at = -1;
  general_run({to_chunk}, r);
  Task chunk = task;
  chunk.begin = chunk_begin, chunk.from = slots_.known_state(before, 0), chunk.to = {}, chunk.probe_at = -1;
  chunk.end = std::min(task.end, chunk_begin + options_.chunk);
  r.chunk = 1, r.outputs = static_cast<bool>(in_.q);
  const BadToken found = general_run({chunk}, r).bad;
  out_ = kept;
  return found.token >= 0 ? found : BadToken{chunk_begin, task.head};
}

template <class T>
void DeltaPasses<T>::copy(const std::vector<Task>& tasks) {
  if (tasks.empty()) return;
  copy_states(space_, tasks_(space_, tasks), static_cast<std::int64_t>(tasks.size()), shape_.d_key, shape_.d_value);
}

template class DeltaPasses<float>;
template class DeltaPasses<double>;

}  // namespace longscan
