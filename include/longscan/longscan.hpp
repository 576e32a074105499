// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Everything: recurrences over sequences that are cut over MPI ranks. Start with DeltaRule (delta_rule.hpp) or Newton
/// (newton.hpp); a Transport joins the ranks (transport.hpp); InputFile and OutputFile are for HDF5
/// (sequence_file.hpp).
#include "longscan/delta_rule.hpp"
#include "longscan/error.hpp"
#include "longscan/newton.hpp"
#include "longscan/partition.hpp"
#include "longscan/sequence_file.hpp"
#include "longscan/transport.hpp"
#include "longscan/types.hpp"
