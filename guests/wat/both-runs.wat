;; A component with nothing in it but the two ways to run a command. The 0.2 one fails, the 0.3 one does not: whoever
;; runs it can tell which was called.
(component
  (core func $return (canon task.return (result (result))))
  (core module $m
    (import "" "return" (func $return (param i32)))
    ;; The error case of `result`.
    (func (export "run-0.2") (result i32) (i32.const 1))
    ;; Returns ok, and says that it is done.
    (func (export "run-0.3") (result i32) (call $return (i32.const 0)) (i32.const 0))
    (func (export "callback") (param i32 i32 i32) (result i32) unreachable)
  )
  (core instance $i (instantiate $m (with "" (instance (export "return" (func $return))))))
  (func $run-0.2 (result (result)) (canon lift (core func $i "run-0.2")))
  (func $run-0.3 async (result (result))
    (canon lift (core func $i "run-0.3") async (callback (core func $i "callback"))))
  (instance $cli-0.2 (export "run" (func $run-0.2)))
  (instance $cli-0.3 (export "run" (func $run-0.3)))
  (export "wasi:cli/run@0.2.6" (instance $cli-0.2))
  (export "wasi:cli/run@0.3.0" (instance $cli-0.3))
)
