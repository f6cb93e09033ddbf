// SPDX-License-Identifier: Apache-2.0
// Torch tensors without a torch header: views and the current stream through the DLPack C exchange
// API, the rest through Python. Included by bindings only.
#pragma once

#include <dlpack/dlpack.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "astrai/host/tensor_view.h"

namespace astrai {

namespace py = pybind11;

class TorchExchange {
 public:
  // The table belongs to torch and outlives the process's last call, so one look-up is enough. It
  // imports, which may let go of the GIL: a plain static would deadlock with a second first caller.
  static const TorchExchange& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchExchange> instance;
    return instance.call_once_and_store_result([] { return TorchExchange(); }).get_stored();
  }

  TensorView view(const char* name, py::handle object) const {
    PyTypeObject* type = Py_TYPE(object.ptr());
    if (type != tensor_type_ && type != parameter_type_) check_subclass(name, type);
    DLTensor tensor;
    // Meta, sparse, quantized, nested and functorch tensors have no memory that could be viewed.
    if (api_->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0)
      throw TypeError(concat(name, ": expected a dense tensor with storage of its own, got a ",
                             type->tp_name, " without (", take_python_error(), ")"));
    return TensorView(name, tensor);
  }

  // An eager kernel has no backward and no forward derivative: it would drop either without a word.
  void refuse_grad(const char* op,
                   std::initializer_list<std::pair<const char*, py::handle>> tensors) const {
    for (const auto& [name, tensor] : tensors) {
      if (tensor.is_none()) continue;
      py::object flag =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), requires_grad_.ptr()));
      if (!flag) throw py::error_already_set();
      if (flag.ptr() == Py_True && is_grad_enabled_().ptr() == Py_True)
        throw std::runtime_error(
            concat(name, ": requires grad, and ", op,
                   " has no backward; call it under torch.no_grad() or torch.inference_mode()"));
    }
    if (has_forward_level())
      for (const auto& [name, tensor] : tensors) refuse_tangent(op, name, tensor);
  }

  cudaStream_t current_stream(DLDevice device) const {
    void* stream = nullptr;
    if (api_->current_work_stream(device.device_type, device.device_id, &stream) != 0)
      throw py::error_already_set();
    return static_cast<cudaStream_t>(stream);
  }

  // An uninitialised tensor of the dtype and device of `like`. Not by the exchange API's allocator:
  // it turns running out of memory into text, and Tensor.record_stream has no effect on its tensors.
  py::object new_empty(py::handle like, std::initializer_list<int64_t> shape) const {
    return call_new_empty(like, shape, nullptr);
  }

  // The same in the shape of `like`, contiguous whatever its strides: half a microsecond less.
  py::object empty_like(py::handle like) const {
    PyObject* const arguments[] = {like.ptr(), contiguous_.ptr()};
    PyObject* const made =
        PyObject_Vectorcall(empty_like_.ptr(), arguments, 1, format_keyword_.ptr());
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }

  // An uninitialised tensor in fp32.
  py::object new_empty_fp32(py::handle like, std::initializer_list<int64_t> shape) const {
    return call_new_empty(like, shape, dtype_keyword_.ptr());
  }

  // Tells autograd that a tensor was written: a backward that needs what it held before then raises.
  void mark_written(py::handle tensor) const { increment_version_(tensor); }

 private:
  TorchExchange() {
    py::object type = py::module_::import("torch").attr("Tensor");
    if (!py::hasattr(type, "__dlpack_c_exchange_api__"))
      throw std::runtime_error(
          "this torch has no DLPack C exchange API; install torch>=2.10 (pip install -U torch)");
    py::object capsule = type.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const DLPackExchangeAPI*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw py::error_already_set();
    // A newer major version may chain an older table that this code can read.
    const DLPackExchangeAPIHeader* header = &api->header;
    while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION)
      header = header->prev_api;
    if (header == nullptr)
      throw std::runtime_error(concat("torch offers DLPack ", api->header.version.major,
                                      ", this package reads DLPack ", DLPACK_MAJOR_VERSION));
    api_ = reinterpret_cast<const DLPackExchangeAPI*>(header);
    if (api_->dltensor_from_py_object_no_sync == nullptr)
      throw std::runtime_error("torch's DLPack C exchange API has no non-owning view");
    dispatch_ = py::object(type.attr("__torch_dispatch__")).release();
    tensor_type_ = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    parameter_type_ = reinterpret_cast<PyTypeObject*>(
        py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr());
    requires_grad_ = py::str("requires_grad").release();
    new_empty_ = py::str("new_empty").release();
    empty_like_ = py::object(py::module_::import("torch").attr("empty_like")).release();
    contiguous_ = py::object(py::module_::import("torch").attr("contiguous_format")).release();
    format_keyword_ = py::make_tuple("memory_format").release();
    fp32_ = py::object(py::module_::import("torch").attr("float32")).release();
    dtype_keyword_ = py::make_tuple("dtype").release();
    is_grad_enabled_ = py::object(py::module_::import("torch").attr("is_grad_enabled")).release();
    increment_version_ =
        py::object(py::module_::import("torch.autograd.graph").attr("increment_version")).release();
    forward_ad_ = py::object(py::module_::import("torch.autograd.forward_ad")).release();
    current_level_ = py::str("_current_level").release();
  }

  py::object call_new_empty(py::handle like, std::initializer_list<int64_t> shape,
                            PyObject* fp32_keyword) const {
    py::tuple sizes(shape.size());
    size_t index = 0;
    for (const int64_t size : shape) sizes[index++] = size;
    PyObject* const arguments[] = {like.ptr(), sizes.ptr(), fp32_.ptr()};
    PyObject* const made = PyObject_VectorcallMethod(new_empty_.ptr(), arguments, 2, fp32_keyword);
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }

  // A subclass that dispatches (fake tensors, distributed and quantized ones) gives its storage a
  // meaning of its own, or has none.
  void check_subclass(const char* name, PyTypeObject* type) const {
    if (!PyType_IsSubtype(type, tensor_type_))
      throw TypeError(concat(name, ": expected a torch.Tensor, got ", type->tp_name));
    const py::object dispatch =
        py::handle(reinterpret_cast<PyObject*>(type)).attr("__torch_dispatch__");
    if (dispatch.ptr() != dispatch_.ptr())
      throw TypeError(concat(name, ": expected a plain torch.Tensor, got a ", type->tp_name,
                             ", which defines __torch_dispatch__"));
  }

  static std::string take_python_error() {
    if (PyErr_Occurred() == nullptr) return "no reason given";
    py::error_already_set error;
    const std::string text = py::str(error.value()).cast<std::string>();
    return text.substr(0, text.find('\n'));
  }

  // Whether a level of forward-mode differentiation is open; where torch does not say, tensors are asked.
  bool has_forward_level() const {
    const py::object level = py::reinterpret_steal<py::object>(
        PyObject_GetAttr(forward_ad_.ptr(), current_level_.ptr()));
    if (!level) {
      PyErr_Clear();
      return true;
    }
    return !PyLong_Check(level.ptr()) || PyLong_AsLong(level.ptr()) >= 0;
  }

  void refuse_tangent(const char* op, const char* name, py::handle tensor) const {
    if (tensor.is_none() || forward_ad_.attr("unpack_dual")(tensor).attr("tangent").is_none())
      return;
    throw std::runtime_error(concat(name, ": has a tangent, and ", op,
                                    " has no forward-mode derivative; give it the primal"));
  }

  // The Python objects live as long as torch does; their references are never given back.
  const DLPackExchangeAPI* api_ = nullptr;
  PyTypeObject* tensor_type_ = nullptr;
  PyTypeObject* parameter_type_ = nullptr;
  py::handle dispatch_;
  py::handle requires_grad_;
  py::handle new_empty_;
  py::handle empty_like_;
  py::handle contiguous_;
  py::handle format_keyword_;
  py::handle fp32_;
  py::handle dtype_keyword_;
  py::handle is_grad_enabled_;
  py::handle increment_version_;
  py::handle forward_ad_;
  py::handle current_level_;
};

inline void register_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const ValueError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const TypeError& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    }
  });
}

}  // namespace astrai
