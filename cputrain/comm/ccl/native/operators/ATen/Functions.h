// Replaces PyTorch's header of this name, which declares all 1,400 operators and takes a third of the compile time, by
// the operators that c10d's headers (cat, empty, empty_strided) and ours use. Needs AT_PER_OPERATOR_HEADERS.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
