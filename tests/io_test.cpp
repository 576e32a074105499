// SPDX-License-Identifier: Apache-2.0
// Files in HDF5: every input type and layout, every way to refuse one, and outputs that are whole or absent.
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/mount.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>

#include "io/hash.hpp"
#include "longscan/error.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {
namespace {

namespace fs = std::filesystem;
using Shape = std::vector<std::int64_t>;

/// A folder of its own for each test.
class IoTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "longscan_io_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string at(const std::string& name) const { return (folder_ / name).string(); }
  fs::path folder_;
};

hid_t small_float(bool brain, H5T_order_t order = H5T_ORDER_LE) {
  const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
  H5Tset_fields(type, 15, brain ? 7 : 10, brain ? 8 : 5, 0, brain ? 7 : 10);
  H5Tset_ebias(type, brain ? 127 : 15);
  H5Tset_size(type, 2);
  H5Tset_order(type, order);
  return type;
}

std::vector<hsize_t> extents(const Shape& shape) { return {shape.begin(), shape.end()}; }

/// Writes files with the C interface. Data is written as it is: memory type = file type.
class Maker {
 public:
  explicit Maker(const std::string& path)
      : file_(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)),
        creation_(H5Pcreate(H5P_DATASET_CREATE)) {
    H5Pset_create_intermediate_group(links_ = H5Pcreate(H5P_LINK_CREATE), 1);
  }
  ~Maker() {
    for (const hid_t id : {creation_, links_}) H5Pclose(id);
    H5Fclose(file_);
  }
  hid_t file() const { return file_; }
  hid_t creation() const { return creation_; }
  void put(const std::string& path, hid_t type, const Shape& shape, const void* data, const std::string& dtype = "") {
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), extents(shape).data(), nullptr);
    const hid_t id = H5Dcreate2(file_, path.c_str(), type, space, links_, creation_, H5P_DEFAULT);
    ASSERT_GE(id, 0) << path;
    EXPECT_TRUE(data == nullptr || H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0) << path;
    if (!dtype.empty()) put_text(id, "dtype", dtype);
    H5Dclose(id);
    H5Sclose(space);
  }
  static void put_text(hid_t object, const std::string& name, const std::string& text) {
    const hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(type, text.size());
    const hid_t id = H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(id, type, text.data());
    H5Aclose(id);
    H5Sclose(space);
    H5Tclose(type);
  }

 private:
  hid_t file_, creation_, links_;
};

std::vector<double> counting(std::int64_t n, double first = 0) {
  std::vector<double> values(n);
  std::iota(values.begin(), values.end(), first);
  return values;
}

template <class Call>
void expect_error(ExitCode code, const std::string& part, Call call) {
  try {
    call();
    FAIL() << "no error that says: " << part;
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code)) << e.what();
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(NaturalOrder, ComparesRunsOfDigitsAsNumbers) {
  EXPECT_TRUE(natural_less("demo_2", "demo_10"));
  EXPECT_FALSE(natural_less("demo_10", "demo_2"));
  EXPECT_TRUE(natural_less("a", "a1"));
  EXPECT_TRUE(natural_less("a9b1", "a10b0"));
  EXPECT_TRUE(natural_less("x99999999999999999999998", "x99999999999999999999999"));
  EXPECT_FALSE(natural_less("demo_2", "demo_2"));
  EXPECT_NE(natural_less("demo_02", "demo_2"), natural_less("demo_2", "demo_02"));
}

TEST_F(IoTest, ReadsEveryFloatingType) {
  const std::vector<std::uint16_t> bf16{0x3f80, 0xc000, 0x3e80, 0x7f80}, half{0x3c00, 0xc000, 0x3400, 0x0001};
  const std::vector<std::uint16_t> half_swapped{0x003c, 0x00c0, 0x0034, 0x0100},
      bf16_swapped{0x803f, 0x00c0, 0x803e, 0x807f};
  const std::vector<double> f64{1, -2, 0.25, 1e-300};
  const std::vector<float> f32{1, -2, 0.25f, 1e30f};
  auto swapped = [](auto values) {
    for (auto& v : values) std::reverse(reinterpret_cast<char*>(&v), reinterpret_cast<char*>(&v + 1));
    return values;
  };
  {
    Maker m(at("types.h5"));
    m.put("/bf16", small_float(true), {4}, bf16.data());
    m.put("/bf16_be", small_float(true, H5T_ORDER_BE), {4}, bf16_swapped.data());
    m.put("/bf16_bits", H5T_STD_U16LE, {4}, bf16.data(), "bfloat16");
    m.put("/bf16_bits_be", H5T_STD_U16BE, {4}, bf16_swapped.data(), "bfloat16");
    m.put("/bf16_opaque", H5Tcreate(H5T_OPAQUE, 2), {4}, bf16.data());
    m.put("/f16", small_float(false), {4}, half.data());
    m.put("/f16_be", small_float(false, H5T_ORDER_BE), {4}, half_swapped.data());
    m.put("/f32", H5T_IEEE_F32LE, {4}, f32.data());
    m.put("/f32_be", H5T_IEEE_F32BE, {4}, swapped(f32).data());
    m.put("/f64", H5T_IEEE_F64LE, {4}, f64.data());
    m.put("/f64_be", H5T_IEEE_F64BE, {4}, swapped(f64).data());
  }
  const InputFile file(at("types.h5"));
  const std::map<std::string, std::pair<DType, double>> last{{"bf16", {DType::bf16, HUGE_VAL}},
                                                             {"f16", {DType::f16, std::ldexp(1.0, -24)}},
                                                             {"f32", {DType::f32, 1e30f}},
                                                             {"f64", {DType::f64, 1e-300}}};
  ASSERT_EQ(file.datasets("/").size(), 11u);
  for (const DatasetInfo& d : file.datasets("/")) {
    const auto& [type, value] = last.at(d.path.substr(1, d.path.find('_') - 1));
    EXPECT_EQ(d.problem, "");
    EXPECT_EQ(d.type, type) << d.path;
    EXPECT_EQ(d.foreign_byte_order, d.path.find("_be") != std::string::npos) << d.path;
    EXPECT_EQ(file.read_doubles(d), (std::vector<double>{1, -2, 0.25, value})) << d.path;
  }
  EXPECT_EQ(file.find("bf16_bits")->storage, Storage::bfloat16_bits);
  EXPECT_EQ(file.find("/bf16_opaque")->storage, Storage::bfloat16_opaque);
  EXPECT_EQ(file.text_attribute("/bf16_bits", "dtype"), "bfloat16");
  // Bits arrive as they were stored.
  std::vector<std::uint16_t> bits(2);
  file.read(*file.find("/f16_be"), {{1}, {2}}, bits.data());
  EXPECT_EQ(bits, (std::vector<std::uint16_t>{half[1], half[2]}));
}

TEST_F(IoTest, ReadsEveryLayoutAndSlabs) {
  const Shape shape{7, 3, 4, 5};
  const auto values = counting(7 * 3 * 4 * 5);
  {
    std::ofstream raw(at("raw.bin"), std::ios::binary);
    raw.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 8));
  }
  {
    Maker plain(at("plain.h5")), compact(at("compact.h5")), chunked(at("chunked.h5")), external(at("external.h5"));
    Maker virtual_one(at("virtual.h5"));
    plain.put("/a/x", H5T_IEEE_F64LE, shape, values.data());
    H5Pset_layout(compact.creation(), H5D_COMPACT);
    compact.put("/a/x", H5T_IEEE_F64LE, shape, values.data());
    const hsize_t chunk[] = {3, 2, 4, 3};
    H5Pset_chunk(chunked.creation(), 4, chunk);
    H5Pset_shuffle(chunked.creation());
    H5Pset_deflate(chunked.creation(), 4);
    chunked.put("/a/x", H5T_IEEE_F64LE, shape, values.data());
    H5Pset_external(external.creation(), at("raw.bin").c_str(), 0, values.size() * 8);
    external.put("/a/x", H5T_IEEE_F64LE, shape, nullptr);
    const hid_t space = H5Screate_simple(4, extents(shape).data(), nullptr);
    H5Pset_virtual(virtual_one.creation(), space, "chunked.h5", "/a/x", space);
    virtual_one.put("/a/x", H5T_IEEE_F64LE, shape, nullptr);
    H5Sclose(space);
  }
  const std::map<std::string, std::string> layouts{{"plain", "contiguous"},
                                                   {"compact", "compact"},
                                                   {"chunked", "chunked 3x2x4x3"},
                                                   {"external", "external"},
                                                   {"virtual", "virtual"}};
  std::vector<std::uint64_t> prints;
  for (const auto& [name, layout] : layouts) {
    const InputFile file(at(name + ".h5"));
    const auto info = file.find("/a/x");
    ASSERT_TRUE(info && info->usable()) << name << (info ? info->problem : "");
    EXPECT_EQ(info->layout, layout);
    EXPECT_EQ(info->shape, shape);
    EXPECT_EQ(file.read_doubles(*info), values) << name;
    std::vector<double> part(2 * 2 * 3 * 1, -1);
    file.read(*info, {{4, 1, 1, 3}, {2, 2, 3, 1}}, part.data());
    EXPECT_EQ(part[0], ((4 * 3 + 1) * 4 + 1) * 5 + 3) << name;
    EXPECT_EQ(part[11], ((5 * 3 + 2) * 4 + 3) * 5 + 3) << name;
    file.read(*info, {{7, 0, 0, 0}, {0, 3, 4, 5}}, nullptr);
    expect_error(ExitCode::internal, "axis 0", [&] { file.read(*info, {{6, 0, 0, 0}, {2, 1, 1, 1}}, part.data()); });
    prints.push_back(file.fingerprint({*info}));
  }
  EXPECT_EQ(InputFile(at("chunked.h5")).find("/a/x")->filters, (std::vector<std::string>{"shuffle", "deflate"}));
  EXPECT_EQ(prints, std::vector<std::uint64_t>(prints.size(), prints[0]));

  // HDF5 itself reads fill values where a source is missing or short.
  fs::remove(at("chunked.h5"));
  EXPECT_NE(InputFile(at("virtual.h5")).find("/a/x")->problem.find("'chunked.h5', which is not there"),
            std::string::npos);
  fs::resize_file(at("raw.bin"), 100);
  EXPECT_NE(InputFile(at("external.h5")).find("/a/x")->problem.find("too short"), std::string::npos);
}

/// Slabs in the system's cache: the same values, and none where bytes lie otherwise than they are read, or elsewhere.
TEST_F(IoTest, MapsWhatLiesAsItIsRead) {
  struct statfs system {};
  ASSERT_EQ(statfs(folder_.c_str(), &system), 0);
  constexpr decltype(system.f_type) ext = 0xef53, xfs = 0x58465342, tmpfs = 0x01021994;
  if (system.f_type != ext && system.f_type != xfs && system.f_type != tmpfs) GTEST_SKIP() << "not a disk of this node";
  const Shape shape{2, 1000, 150};  // 2.4 MB of float64
  const auto values = counting(2 * 1000 * 150);
  auto swapped = values;
  for (double& v : swapped) std::reverse(reinterpret_cast<char*>(&v), reinterpret_cast<char*>(&v + 1));
  {
    Maker plain(at("plain.h5")), chunked(at("chunked.h5")), linked(at("linked.h5")), external(at("external.h5"));
    plain.put("/first", H5T_IEEE_F64LE, {3}, values.data());  // so that x starts anywhere
    plain.put("/x", H5T_IEEE_F64LE, shape, values.data());
    plain.put("/swapped", H5T_IEEE_F64BE, shape, swapped.data());
    plain.put("/odd", H5T_STD_I8LE, {3}, values.data());
    plain.put("/unaligned", H5T_IEEE_F64LE, shape, values.data());
    const hsize_t chunk[] = {2, 1000, 150};
    H5Pset_chunk(chunked.creation(), 3, chunk);
    chunked.put("/x", H5T_IEEE_F64LE, shape, values.data());
    H5Lcreate_external("plain.h5", "/x", linked.file(), "/x", H5P_DEFAULT, H5P_DEFAULT);
    std::ofstream(at("raw.bin"), std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 8));
    H5Pset_external(external.creation(), at("raw.bin").c_str(), 0, values.size() * 8);
    external.put("/x", H5T_IEEE_F64LE, shape, nullptr);
  }
  fs::create_symlink("plain.h5", at("symlink.h5"));
  for (const char* name : {"plain.h5", "symlink.h5"}) {
    const InputFile file(at(name));
    const auto x = file.find("/x");
    for (const Slab& slab : {Slab{{0, 0, 0}, shape}, Slab{{1, 7, 0}, {1, 990, 150}}}) {
      const auto mapped = file.map(*x, slab);
      ASSERT_TRUE(mapped) << name;
      file.load(*mapped);
      std::vector<double> read(slab.count[0] * slab.count[1] * slab.count[2]);
      file.read(*x, slab, read.data());
      EXPECT_EQ(std::memcmp(mapped->data(), read.data(), read.size() * sizeof(double)), 0) << name;
      EXPECT_EQ(read[0], static_cast<double>((slab.begin[0] * 1000 + slab.begin[1]) * 150));
    }
    file.require_whole();
    EXPECT_FALSE(file.map(*x, {{0, 0, 0}, {2, 900, 150}})) << "two runs";
    EXPECT_FALSE(file.map(*x, {{0, 0, 0}, {1, 100, 150}})) << "not worth it";
    EXPECT_FALSE(file.map(*file.find("/swapped"), {{0, 0, 0}, shape}));
    EXPECT_FALSE(file.map(*file.find("/unaligned"), {{0, 0, 0}, shape}));
    expect_error(ExitCode::internal, "axis 1", [&] { file.map(*x, {{0, 1, 0}, {2, 1000, 150}}); });
  }
  for (const char* name : {"chunked.h5", "linked.h5", "external.h5"}) {
    const InputFile file(at(name));
    EXPECT_FALSE(file.map(*file.find("/x"), {{0, 0, 0}, shape})) << name;
  }
}

TEST_F(IoTest, SurvivesAMappedFileThatIsCutShort) {
  const Shape shape{300000};
  const auto values = counting(300000, 1);
  Maker(at("in.h5")).put("/x", H5T_IEEE_F64LE, shape, values.data());
  const InputFile file(at("in.h5"));
  auto mapped = file.map(*file.find("/x"), {{0}, shape});
  if (!mapped) GTEST_SKIP() << "not a disk of this node";
  file.load(*mapped);
  const auto* x = reinterpret_cast<const double*>(mapped->data());
  EXPECT_EQ(x[299999], 300000);
  const auto size = fs::file_size(at("in.h5"));
  fs::resize_file(at("in.h5"), size / 2);
  EXPECT_EQ(x[1000], 1001);
  EXPECT_EQ(x[299999], 0);  // what is gone reads as zero
  expect_error(ExitCode::file_io, "was cut short", [&] { file.require_whole(); });
  expect_error(ExitCode::file_io, "was cut short", [&] { file.load(*mapped); });
  fs::resize_file(at("in.h5"), size);
  expect_error(ExitCode::file_io, "could not bring all of its bytes", [&] { file.require_whole(); });
  mapped.reset();
  const InputFile again(at("in.h5"));
  EXPECT_TRUE(again.map(*again.find("/x"), {{0}, shape}));
  again.require_whole();
}

TEST_F(IoTest, SeesThatAMappedFileIsWritten) {
  const Shape shape{300000};
  const auto values = counting(300000, 1);
  Maker(at("in.h5")).put("/x", H5T_IEEE_F64LE, shape, values.data());
  const InputFile file(at("in.h5"));
  const auto later = [&] {
    fs::last_write_time(at("in.h5"), fs::file_time_type::clock::now() + std::chrono::hours(1));
  };
  later();
  file.require_whole();  // what is read into memory has been read whole
  const InputFile again(at("in.h5"));
  const auto mapped = again.map(*again.find("/x"), {{0}, shape});
  if (!mapped) GTEST_SKIP() << "not a disk of this node";
  again.load(*mapped);
  again.require_whole();
  fs::last_write_time(at("in.h5"), fs::last_write_time(at("in.h5")) + std::chrono::hours(1));
  expect_error(ExitCode::file_io, "was written while it was read", [&] { again.require_whole(); });
}

/// Or memory would be taken for what is not there.
TEST_F(IoTest, SeesAShapeThatTheFileCannotHold) {
  const std::vector<double> values = counting(4242);
  { Maker(at("x.h5")).put("/x", H5T_IEEE_F64LE, {4242}, values.data()); }
  std::fstream file(at("x.h5"), std::ios::in | std::ios::out | std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  const std::string extent("\x92\x10\0\0\0\0\0\0", 8), damaged("\x92\x10\0\0\0\1\0\0", 8);
  std::size_t changed = 0;
  for (std::size_t at = bytes.find(extent); at != std::string::npos; at = bytes.find(extent, at), ++changed)
    bytes.replace(at, extent.size(), damaged);
  ASSERT_GT(changed, 0U);
  file.seekp(0);
  file << bytes << std::flush;
  const auto info = InputFile(at("x.h5")).find("/x");
  ASSERT_TRUE(info);
  EXPECT_EQ(info->shape, Shape{(std::int64_t{1} << 40) + 4242});
  EXPECT_FALSE(info->usable());
  EXPECT_NE(info->problem.find("the file is damaged"), std::string::npos) << info->problem;
}

std::size_t pass_through(unsigned, size_t, const unsigned*, size_t bytes, size_t*, void**) { return bytes; }

TEST_F(IoTest, SaysWhatIsWrongWithADataset) {
  const std::vector<std::int64_t> zeros(64);
  {
    Maker m(at("bad.h5"));
    m.put("/uint16", H5T_STD_U16LE, {4}, zeros.data());
    m.put("/int32", H5T_STD_I32LE, {4}, zeros.data());
    const hid_t text = H5Tcopy(H5T_C_S1);
    H5Tset_size(text, 3);
    m.put("/text", text, {4}, zeros.data());
    m.put("/opaque8", H5Tcreate(H5T_OPAQUE, 8), {4}, zeros.data());
    H5Lcreate_soft("/nowhere", m.file(), "/link", H5P_DEFAULT, H5P_DEFAULT);
    const H5Z_class2_t lzf{H5Z_CLASS_T_VERS, 32000, 1, 1, "lzf", nullptr, nullptr, pass_through};
    H5Zregister(&lzf);
    const hsize_t chunk[] = {2};
    H5Pset_chunk(m.creation(), 1, chunk);
    H5Pset_filter(m.creation(), 32000, H5Z_FLAG_OPTIONAL, 0, nullptr);
    m.put("/lzf", H5T_IEEE_F32LE, {4}, zeros.data());
  }
  H5Zunregister(32000);
  const InputFile file(at("bad.h5"));
  const std::map<std::string, std::string> problems{
      {"/uint16", "dataset '/uint16' holds unmarked uint16; if these are bfloat16 bit patterns"},
      {"/int32", "dataset '/int32' holds 32-bit integers; floating-point numbers are needed"},
      {"/text", "dataset '/text' holds text"},
      {"/opaque8", "dataset '/opaque8' holds opaque bytes"},
      {"/link", "dataset '/link' is a link to '/nowhere', which cannot be opened"},
      {"/lzf", "dataset '/lzf' is compressed with the filter lzf (32000), which this HDF5 does not have"}};
  ASSERT_EQ(file.datasets("/").size(), problems.size());
  for (const DatasetInfo& d : file.datasets("/")) {
    EXPECT_EQ(d.problem.rfind(problems.at(d.path), 0), 0u) << d.problem;
    expect_error(ExitCode::bad_input, d.problem, [&] { file.read(d, {{0}, {1}}, nullptr); });
  }
  EXPECT_EQ(file.find("/none"), std::nullopt);
  EXPECT_EQ(file.find("/none/x"), std::nullopt);
  expect_error(ExitCode::bad_input, "no group '/none'", [&] { file.datasets("/none"); });
}

TEST_F(IoTest, RefusesWhatIsNotAWholeFile) {
  expect_error(ExitCode::file_io, "No such file", [&] { InputFile{at("missing.h5")}; });
  expect_error(ExitCode::file_io, "there is no directory", [&] { InputFile{at("no/missing.h5")}; });
  expect_error(ExitCode::file_io, "regular file", [&] { InputFile{folder_.string()}; });
  std::ofstream(at("text.h5")) << "not an HDF5 file at all\n";
  expect_error(ExitCode::bad_input, "is not an HDF5 file", [&] { InputFile{at("text.h5")}; });
  Maker(at("cut.h5")).put("/x", H5T_IEEE_F64LE, {1000}, counting(1000).data());
  fs::resize_file(at("cut.h5"), fs::file_size(at("cut.h5")) / 2);
  expect_error(ExitCode::bad_input, "truncated", [&] { InputFile{at("cut.h5")}; });
}

TEST_F(IoTest, ReadsIntegersThatFit) {
  const std::vector<std::uint64_t> large{1, ~0ull};
  const std::vector<std::int16_t> small{0, -3, 7};
  {
    Maker m(at("i.h5"));
    m.put("/large", H5T_STD_U64LE, {2}, large.data());
    m.put("/small", H5T_STD_I16LE, {3}, small.data());
    m.put("/uint16", H5T_STD_U16LE, {2}, small.data());
    m.put("/float", H5T_IEEE_F64LE, {1}, large.data());
  }
  const InputFile file(at("i.h5"));
  EXPECT_EQ(file.read_integers(*file.find("/small")), (Shape{0, -3, 7}));
  EXPECT_EQ(file.read_integers(*file.find("/uint16")), (Shape{0, 65533}));
  expect_error(ExitCode::bad_input, "value 1 of", [&] { file.read_integers(*file.find("/large")); });
  expect_error(ExitCode::bad_input, "integers are needed", [&] { file.read_integers(*file.find("/float")); });
}

TEST_F(IoTest, ListsGroupsInNaturalOrder) {
  {
    Maker m(at("g.h5"));
    const double x = 1;
    for (const char* name : {"demo_10/q", "demo_2/q", "demo_0/q", "demo_0/sub/q", "cell/w"})
      m.put(name, H5T_IEEE_F64LE, {1}, &x);
    H5Lcreate_soft("/", m.file(), "/demo_0/up", H5P_DEFAULT, H5P_DEFAULT);
  }
  const InputFile file(at("g.h5"));
  EXPECT_EQ(file.groups(), (std::vector<std::string>{"/", "/cell", "/demo_0", "/demo_0/sub", "/demo_2", "/demo_10"}));
  EXPECT_EQ(file.match_groups("demo_*"), (std::vector<std::string>{"/demo_0", "/demo_2", "/demo_10"}));
  EXPECT_EQ(file.match_groups("/demo_0/*"), (std::vector<std::string>{"/demo_0/sub"}));
  EXPECT_EQ(file.match_groups("/"), (std::vector<std::string>{"/"}));
  EXPECT_TRUE(file.match_groups("/other*").empty());
  EXPECT_EQ(file.subgroups("/"), (std::vector<std::string>{"cell", "demo_0", "demo_2", "demo_10"}));
}

TEST_F(IoTest, FingerprintSeesEachSmallChange) {
  auto print = [&](const Shape& shape, std::int64_t changed) {
    auto values = counting(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
    if (changed >= 0) values[changed] += 0.5;
    Maker(at("f.h5")).put("/x", H5T_IEEE_F64LE, shape, values.data());
    const InputFile file(at("f.h5"));
    return file.fingerprint(file.datasets("/"));
  };
  EXPECT_EQ(print({40, 6}, -1), print({40, 6}, -1));
  EXPECT_NE(print({40, 6}, -1), print({40, 6}, 123));
  EXPECT_NE(print({40, 6}, -1), print({6, 40}, -1));
  for (const Shape& large : {Shape{300000}, Shape{2, 3, 50000}, Shape{2, 150000}, Shape{30000, 10}}) {
    EXPECT_EQ(print(large, -1), print(large, -1));
    EXPECT_NE(print(large, -1), print(large, 0));
    EXPECT_NE(print(large, -1), print(large, 299999));
  }
}

TEST(Hash, SeesEveryByteOfAnyLength) {
  for (const std::size_t bytes : {1, 8, 13, 1023, 1024, 1055, 1056, 2001}) {  // from 1024 on in lanes
    std::vector<unsigned char> data(bytes, 7);
    const auto print = [&] {
      io::Hash hash;
      hash.add(data.data(), data.size());
      return hash.result();
    };
    std::set<std::uint64_t> seen{print()};
    for (unsigned char& byte : data) {
      ++byte, seen.insert(print()), --byte;
    }
    EXPECT_EQ(seen.size(), bytes + 1) << bytes;
  }
}

TEST_F(IoTest, WritesFromSeveralJoinersAndCommits) {
  const std::string path = at("out.h5");
  std::ofstream(path) << "old";
  auto creator = OutputFile::create(path,
                                    {{"/o", {6, 4}, DType::f32},
                                     {"/g/h", {2, 6, 3}, DType::bf16},
                                     {"/half", {3}, DType::f16},
                                     {"/state", {}, DType::f64},
                                     {"/empty", {0, 2, 3}, DType::f64}},
                                    {{"version", std::string("1.0 α")}, {"tokens", std::int64_t{6}}});
  auto other = OutputFile::join(path, creator.datasets());
  EXPECT_EQ(creator.dataset("/empty").offset, -1);
  std::vector<float> o(24);
  std::iota(o.begin(), o.end(), 0.0f);
  creator.write(creator.dataset("/o"), {{0, 0}, {2, 4}}, o.data());
  other.write(other.dataset("/o"), {{2, 0}, {4, 4}}, o.data() + 8);
  // Tokens in the middle axis: one run a batch entry; then columns: one run a row.
  const std::vector<std::uint16_t> one(12, 0x3f80), two(18, 0x4000), three(6, 0x4040);
  creator.write(creator.dataset("/g/h"), {{0, 0, 0}, {2, 2, 3}}, one.data());
  other.write(other.dataset("/g/h"), {{0, 2, 0}, {2, 3, 3}}, two.data());
  other.write(other.dataset("/g/h"), {{0, 5, 0}, {2, 1, 3}}, three.data());
  other.write(other.dataset("/g/h"), {{0, 1, 1}, {2, 1, 1}}, two.data());
  const std::vector<std::uint16_t> half{0x3c00, 0xc000, 0x3400};
  creator.write(creator.dataset("/half"), {{0}, {3}}, half.data());
  const double state = 42;
  creator.write(creator.dataset("/state"), {{}, {}}, &state);
  creator.write(creator.dataset("/empty"), {{0, 0, 0}, {0, 2, 3}}, nullptr);
  expect_error(ExitCode::internal, "axis 1", [&] { other.write(other.dataset("/o"), {{0, 1}, {1, 4}}, o.data()); });
  expect_error(ExitCode::internal, "did not create", [&] { other.commit(); });
  expect_error(ExitCode::file_io, "another process is writing", [&] { OutputFile::create(path, {}, {}); });
  other.sync();
  EXPECT_EQ(fs::file_size(path), 3u);  // the old one is there to the last moment
  creator.commit({{"seconds", 1.5},
                  {"history", std::vector<double>{3, 2, 1}},
                  {"none", std::vector<double>{}},
                  {"tokens", std::int64_t{7}}});
  EXPECT_FALSE(fs::exists(OutputFile::temporary_name(path)));

  const InputFile file(path);
  EXPECT_EQ(file.read_doubles(*file.find("/o")), counting(24));
  EXPECT_EQ(file.read_doubles(*file.find("/half")), (std::vector<double>{1, -2, 0.25}));
  EXPECT_EQ(file.read_doubles(*file.find("/state")), (std::vector<double>{42}));
  EXPECT_EQ(file.find("/empty")->shape, (Shape{0, 2, 3}));
  EXPECT_TRUE(file.read_doubles(*file.find("/empty")).empty());
  const std::vector<double> entry{1, 1, 1, 1, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3};
  auto h = entry;
  h.insert(h.end(), entry.begin(), entry.end());
  EXPECT_EQ(file.read_doubles(*file.find("/g/h")), h);
  EXPECT_EQ(file.text_attribute("/", "version"), "1.0 α");
  EXPECT_EQ(file.number_attribute("/", "tokens"), 7);
  EXPECT_EQ(file.number_attribute("/", "seconds"), 1.5);
  EXPECT_EQ(file.number_attribute("/", "history"), std::nullopt);
}

// Whole pages go past the system's cache where memory lies as they do: never more or less than what was given.
TEST_F(IoTest, WritesMuchFromAnywhereToAnywhere) {
  constexpr std::int64_t first = 700001, second = 611111, all = first + second + 5, page = 4096;
  std::vector<float> memory(all + page), expected(all), values(all);
  std::iota(expected.begin(), expected.end(), 1.0f);
  for (const std::int64_t skip : {0, 1, 128}) {  // floats away from where the page of the file would lie
    const std::string path = at("out.h5");
    auto file = OutputFile::create(path, {{"/before", {7}, DType::f32}, {"/o", {all}, DType::f32}}, {});
    auto other = OutputFile::join(path, file.datasets());
    const auto write = [&](OutputFile& to, std::int64_t begin, std::int64_t n) {
      const OutputDataset& o = to.dataset("/o");
      const auto at_page = (static_cast<std::uintptr_t>(o.offset) + begin * sizeof(float) -
                            reinterpret_cast<std::uintptr_t>(memory.data())) %
                           page;
      float* const from = memory.data() + at_page / sizeof(float) + skip;
      std::copy_n(expected.data() + begin, n, from);
      to.write(o, {{begin}, {n}}, from);
    };
    write(file, first + second, 5), write(other, first, second), write(file, 0, first);
    file.write(file.dataset("/before"), {{0}, {7}}, expected.data());
    file.commit();
    const InputFile found(path);
    found.read(*found.find("/o"), {{0}, {all}}, values.data());
    EXPECT_TRUE(values == expected) << skip;
    EXPECT_EQ(found.read_doubles(*found.find("/before")), (std::vector<double>{1, 2, 3, 4, 5, 6, 7}));
  }
}

TEST_F(IoTest, LeavesNothingBehind) {
  const std::string path = at("out.h5"), part = OutputFile::temporary_name(path);
  std::ofstream(part) << "somebody's own";
  expect_error(ExitCode::usage, "in the way", [&] { OutputFile::create(path, {{"/o", {3}, DType::f64}}, {}); });
  EXPECT_TRUE(fs::exists(part));
  std::ofstream(part) << "\x89"
                         "HDF\r\n";
  {
    auto file = OutputFile::create(path, {{"/o", {3}, DType::f64}}, {});
    EXPECT_TRUE(fs::exists(part));
    file.abandon();
    EXPECT_FALSE(fs::exists(part));
    expect_error(ExitCode::internal, "commit", [&] { file.commit(); });
  }
  { const auto file = OutputFile::create(path, {{"/o", {3}, DType::f64}}, {}); }
  expect_error(ExitCode::file_io, "there is no directory", [&] { OutputFile::create(at("no/out.h5"), {}, {}); });
  expect_error(ExitCode::file_io, "is a directory", [&] { OutputFile::create(folder_.string(), {}, {}); });
  expect_error(ExitCode::file_io, "/o", [&] {
    OutputFile::create(path, {{"/o", {3}, DType::f64}, {"/o", {3}, DType::f64}}, {});
  });
  expect_error(ExitCode::file_io, "No such file", [&] { OutputFile::join(path, {}); });
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(IoTest, FullDiskShowsAndLeavesNothing) {
  if (mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "mounting a tmpfs is not permitted";
  const std::unique_ptr<const char, int (*)(const char*)> mounted(folder_.c_str(), umount);
  const auto too_large = [&] { OutputFile::create(at("out.h5"), {{"/o", {1 << 20}, DType::f64}}, {}); };
  expect_error(ExitCode::file_io, "no room for", too_large);
  EXPECT_TRUE(fs::is_empty(folder_));
  {
    auto fits = OutputFile::create(at("fits.h5"), {{"/o", {1 << 16}, DType::f64}}, {});
    auto doomed = OutputFile::create(at("doomed.h5"), {{"/o", {1}, DType::f64}}, {});
    // Not a byte left: what was promised still works, and nothing else does.
    std::ofstream(at("filler")) << std::string(1 << 20, 'x');
    expect_error(ExitCode::file_io, "no room for", too_large);
    expect_error(ExitCode::file_io, "No space left", [&] { doomed.commit({{"x", std::string(1 << 20, 'x')}}); });
    const auto values = counting(1 << 16);
    fits.write(fits.dataset("/o"), {{0}, {1 << 16}}, values.data());
    fits.commit({{"options", std::string(3000, 'o')}});
    const InputFile file(at("fits.h5"));
    EXPECT_EQ(file.read_doubles(*file.find("/o")), values);
  }
  for (const auto& entry : fs::directory_iterator(folder_))
    EXPECT_TRUE(entry.path().filename() == "fits.h5" || entry.path().filename() == "filler") << entry.path();
}

}  // namespace
}  // namespace longscan
