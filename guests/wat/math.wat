;; A core module whose exports are called with numbers.
(module
  (func (export "add") (param i32 i32) (result i32) (i32.add (local.get 0) (local.get 1)))
  (func (export "mul64") (param i64 i64) (result i64) (i64.mul (local.get 0) (local.get 1)))
  (func (export "scale") (param f32 f64) (result f32 f64)
    (f32.mul (local.get 0) (f32.const 2)) (f64.mul (local.get 1) (f64.const 2)))
  (func (export "fib") (param i32) (result i64)
    (local $a i64) (local $b i64) (local $t i64)
    (local.set $b (i64.const 1))
    (block $done
      (loop $next
        (br_if $done (i32.eqz (local.get 0)))
        (local.set $t (i64.add (local.get $a) (local.get $b)))
        (local.set $a (local.get $b))
        (local.set $b (local.get $t))
        (local.set 0 (i32.sub (local.get 0) (i32.const 1)))
        (br $next)))
    (local.get $a))
  (func (export "nothing")))
