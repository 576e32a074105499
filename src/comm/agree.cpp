// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <new>
#include <string>

#include "longscan/error.hpp"
#include "longscan/transport.hpp"

namespace longscan {

std::string broadcast(Transport& ranks, std::string text, int root) {
  std::int64_t bytes = static_cast<std::int64_t>(text.size());
  ranks.broadcast(&bytes, sizeof bytes, root);
  text.resize(static_cast<std::size_t>(bytes));
  if (bytes > 0) ranks.broadcast(text.data(), bytes, root);
  return text;
}

void agree(Transport& ranks, const std::function<void()>& work) {
  ExitCode code = ExitCode::ok;
  std::string message;
  try {
    work();
  } catch (const Error& e) {
    code = e.code(), message = e.what();
  } catch (const std::bad_alloc&) {
    code = ExitCode::resources, message = "out of memory; try more ranks or a smaller --window";
  } catch (const std::exception& e) {
    code = ExitCode::internal, message = std::string("internal error: ") + e.what();
  }
  std::int64_t failing = code == ExitCode::ok ? ranks.size() : ranks.rank();
  ranks.all_reduce(&failing, 1, Transport::Reduction::min);
  if (failing == ranks.size()) return;
  const int from = static_cast<int>(failing);
  std::int64_t number = static_cast<std::int64_t>(code);
  ranks.broadcast(&number, sizeof number, from);
  throw Error(static_cast<ExitCode>(number), broadcast(ranks, message, from));
}

}  // namespace longscan
