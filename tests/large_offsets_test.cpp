// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 2^31 elements, in files and in memory. What lies between is never touched, so it takes no room.
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <filesystem>

#include "delta_cases.hpp"
#include "local/check_inputs.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {
namespace {

namespace fs = std::filesystem;

/// A folder of its own for each test.
class LargeOffsets : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "longscan_large_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string at(const std::string& name) const { return (folder_ / name).string(); }
  /// Bytes that the file takes on disk.
  std::int64_t taken(const std::string& path) const {
    struct stat s {};
    return stat(path.c_str(), &s) == 0 ? std::int64_t{s.st_blocks} * 512 : -1;
  }
  /// A contiguous float32 dataset whose space is there without a byte of it written; returns its offset.
  std::int64_t make_sparse(const std::string& path, const char* name, const std::vector<hsize_t>& shape) const {
    const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t dataset = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    const haddr_t offset = H5Dget_offset(dataset);
    H5Dclose(dataset), H5Sclose(space), H5Pclose(creation);
    EXPECT_GE(H5Fclose(file), 0);
    return offset == HADDR_UNDEF ? -1 : static_cast<std::int64_t>(offset);
  }
  fs::path folder_;
};

TEST_F(LargeOffsets, SlabsBeyondTwoToThe31) {
  // 2^31 + 3 * 2^20 elements of float32 in one dataset [T,H,K]: 8 GiB that are not there
  const std::int64_t H = 16, K = 64, row = H * K, tokens = (std::int64_t{1} << 21) + 3072;
  static_assert((std::int64_t{1} << 21) * 16 * 64 == std::int64_t{1} << 31);
  const std::string path = at("large.h5"), part = OutputFile::temporary_name(path);
  const std::int64_t offset = make_sparse(part, "/o", {hsize_t(tokens), hsize_t(H), hsize_t(K)});
  ASSERT_GT(offset, 0);
  if (taken(part) > (std::int64_t{64} << 20)) GTEST_SKIP() << "this file system has no sparse files: " << folder_;

  // written by OutputFile: the last tokens, and some whose elements straddle 2^31 (and bytes 2^32 and 2^33)
  const std::vector<OutputDataset> datasets = {{"/o", {tokens, H, K}, DType::f32, offset}};
  const std::int64_t places[] = {0, (std::int64_t{1} << 19) - 1, (std::int64_t{1} << 20) - 1,
                                 (std::int64_t{1} << 21) - 1, tokens - 2};
  const auto value = [&](std::int64_t t, std::int64_t i) { return static_cast<float>(t % 65536 + 0.001 * i); };
  {
    OutputFile out = OutputFile::join(path, datasets);
    for (std::int64_t t : places) {
      std::vector<float> data(2 * row);
      for (std::int64_t i = 0; i < 2 * row; ++i) data[i] = value(t, i);
      out.write(out.dataset("/o"), {{t, 0, 0}, {2, H, K}}, data.data());
    }
    const float last = -7;
    out.write(out.dataset("/o"), {{tokens - 1, H - 1, K - 1}, {1, 1, 1}}, &last);
    out.sync();
  }
  fs::rename(part, path);
  EXPECT_LT(taken(path), std::int64_t{64} << 20);
  EXPECT_EQ(static_cast<std::int64_t>(fs::file_size(path)), offset + tokens * row * 4);

  // read by InputFile
  const InputFile in(path);
  const auto info = in.find("/o");
  ASSERT_TRUE(info.has_value());
  ASSERT_TRUE(info->usable()) << info->problem;
  EXPECT_EQ(info->elements(), tokens * row);
  EXPECT_GT(info->elements(), std::int64_t{1} << 31);
  for (std::int64_t t : places) {
    std::vector<float> data(2 * row);
    in.read(*info, {{t, 0, 0}, {2, H, K}}, data.data());
    for (std::int64_t i = 0; i < 2 * row; ++i) {
      const bool last = t + 2 == tokens && i + 1 == 2 * row;
      ASSERT_EQ(data[i], last ? -7 : value(t, i)) << "token " << t << ", element " << i;
    }
    float one = 0;
    in.read(*info, {{t + 1, 3, 5}, {1, 1, 1}}, &one);
    EXPECT_EQ(one, value(t, row + 3 * K + 5));
  }
  std::vector<float> hole(row, 1);
  in.read(*info, {{(std::int64_t{1} << 20) + 77, 0, 0}, {1, H, K}}, hole.data());
  EXPECT_EQ(hole, std::vector<float>(row, 0.0f));

  // and by HDF5 itself, with its own idea of where an element is
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, "/o", H5P_DEFAULT), space = H5Dget_space(dataset);
  for (std::int64_t t : places) {
    const hsize_t begin[] = {hsize_t(t), 0, 0}, count[] = {2, hsize_t(H), hsize_t(K)};
    H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, nullptr, count, nullptr);
    const hid_t memory = H5Screate_simple(3, count, nullptr);
    std::vector<float> data(2 * row);
    EXPECT_GE(H5Dread(dataset, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, data.data()), 0);
    H5Sclose(memory);
    for (std::int64_t i = 0; i + 1 < 2 * row; ++i) ASSERT_EQ(data[i], value(t, i)) << "token " << t;
  }
  H5Sclose(space), H5Dclose(dataset), H5Fclose(file);
}

TEST_F(LargeOffsets, OneAxisLongerThanTwoToThe31) {
  const std::string path = at("long.h5"), part = OutputFile::temporary_name(path);
  const std::int64_t tokens = (std::int64_t{1} << 31) + 5, first = make_sparse(part, "/x", {hsize_t(tokens)});
  ASSERT_GT(first, 0);
  if (taken(part) > (std::int64_t{64} << 20)) GTEST_SKIP() << "this file system has no sparse files: " << folder_;
  OutputFile out = OutputFile::join(path, {{"/x", {tokens}, DType::f32, first}});
  const std::vector<float> values = {1, 2, 3, 4, 5};
  out.write(out.dataset("/x"), {{tokens - 5}, {5}}, values.data());
  fs::rename(part, path);
  const InputFile in(path);
  std::vector<float> got(5);
  in.read(*in.find("/x"), {{tokens - 5}, {5}}, got.data());
  EXPECT_EQ(got, values);
}

/// Address space without memory behind it, until it is written.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reserved() {
    if (data()) munmap(data_, bytes_);
  }
  void* data() const { return data_ == MAP_FAILED ? nullptr : data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

TEST_F(LargeOffsets, ArraysInMemoryMayHaveAnyStride) {
  if constexpr (!is_host_space<Kokkos::DefaultExecutionSpace>)
    GTEST_SKIP() << "the default execution space cannot reach memory that the host reserves";
  // tokens are 2^29 elements apart, heads 2^27: the last token begins beyond 2^32
  test::Recipe r;
  r.tokens = 9, r.type = DType::bf16, r.decay = test::Decay::channel;
  const test::Case c = test::make_case(r);
  const std::int64_t token_stride = std::int64_t{1} << 29, head_stride = std::int64_t{1} << 27;
  const std::size_t bytes = static_cast<std::size_t>(r.tokens) * token_stride * 2;
  const Reserved k(bytes), o(bytes);
  if (!k.data() || !o.data()) GTEST_SKIP() << "no address space for 9 GiB twice";
  DeltaInputs in = c.host();
  for (std::int64_t t = 0; t < r.tokens; ++t)
    for (int h = 0; h < r.heads; ++h)
      for (int i = 0; i < r.d_key; ++i)
        store(k.data(), DType::bf16, t * token_stride + h * head_stride + i, c.k.get(t, h, i));
  in.k = {k.data(), DType::bf16, token_stride, head_stride, 1};
  DeltaOutputs out;
  out.o = {o.data(), DType::bf16, token_stride, head_stride};
  const auto ranks = make_single_transport();
  DeltaRule(*ranks, c.shape, c.options, c.sequences).solve({0, r.tokens}, in, out);
  const test::Solution expected = test::solve(*ranks, c);
  for (std::int64_t t = 0; t < r.tokens; ++t)
    for (int h = 0; h < r.heads; ++h)
      for (int i = 0; i < r.d_value; ++i) {
        const auto x = static_cast<float>(expected.o[(t * r.heads + h) * r.d_value + i]);
        ASSERT_EQ(load<float>(o.data(), DType::bf16, t * token_stride + h * head_stride + i), from_bf16(to_bf16(x)));
      }
  EXPECT_EQ(first_outside(in.k, r.tokens, r.heads, r.d_key, Domain::finite), -1);
  store(k.data(), DType::bf16, 8 * token_stride + head_stride + 3, HUGE_VAL);
  EXPECT_EQ(first_outside(in.k, r.tokens, r.heads, r.d_key, Domain::finite), (8 * r.heads + 1) * r.d_key + 3);
}

}  // namespace
}  // namespace longscan
