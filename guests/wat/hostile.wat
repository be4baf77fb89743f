;; A core module that misbehaves on request.
(module
  (memory (export "memory") 1)
  (func (export "trap") unreachable)
  (func (export "divide") (param i32 i32) (result i32) (i32.div_s (local.get 0) (local.get 1)))
  (func (export "forever") (loop $again (br $again)))
  (func $deeper (export "recurse") (param i32) (result i32)
    (i32.add (i32.const 1) (call $deeper (i32.add (local.get 0) (i32.const 1)))))
  ;; Grows until refused, touching each page; returns the pages it got.
  (func (export "grow") (result i32)
    (block $full
      (loop $more
        (br_if $full (i32.eq (memory.grow (i32.const 16)) (i32.const -1)))
        (i32.store (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 8)) (i32.const 1))
        (br $more)))
    (memory.size))
  ;; Leaves a mark and says whether one was there: an instance must never see another's.
  (func (export "stain") (result i32)
    (i32.load (i32.const 1024))
    (i32.store (i32.const 1024) (i32.const 42)))
  (func (export "out_of_bounds") (result i32) (i32.load (i32.const 0x7fffffff))))
