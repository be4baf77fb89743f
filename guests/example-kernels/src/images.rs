//! Images of 32-bit pixels: red, green, blue, alpha, from the lowest byte up.

use tensor_wasm_kernel::global_id;

/// The Mandelbrot set around the pixel at the upper left, which is `left` and `top`; a pixel is `step` wide and high.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mandelbrot(
    width: usize,
    height: usize,
    left: f64,
    top: f64,
    step: f64,
    iterations_max: u32,
    out: *mut u32,
) {
    let (column, row) = (global_id(0), global_id(1));
    if column >= width || row >= height {
        return;
    }
    let (cx, cy) = (left + column as f64 * step, top - row as f64 * step);
    let (mut x, mut y, mut iterations) = (0.0, 0.0, 0);
    while iterations < iterations_max {
        let (xx, yy) = (x * x, y * y);
        if xx + yy > 4.0 {
            break;
        }
        y = 2.0 * x * y + cy;
        x = xx - yy + cx;
        iterations += 1;
    }
    unsafe { *out.add(row * width + column) = color(iterations, iterations_max) }
}

/// From black over blue and yellow to black again, which is also what the set itself is.
#[inline(always)]
fn color(iterations: u32, iterations_max: u32) -> u32 {
    let t = iterations as f32 / iterations_max as f32;
    let s = 1.0 - t;
    let channel = |value: f32| (value * 255.0) as u32;
    pixel([channel(9.0 * s * t * t * t), channel(15.0 * s * s * t * t), channel(8.5 * s * s * s * t), 255])
}

/// The mean of the pixels up to `radius` away: along rows, or where `down` is not zero, along columns. Both together
/// blur an image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blur(width: usize, height: usize, radius: usize, down: usize, from: *const u32, to: *mut u32) {
    let (x, y) = (global_id(0), global_id(1));
    if x >= width || y >= height {
        return;
    }
    let (own, end, start, stride) = if down != 0 { (y, height, x, width) } else { (x, width, y * width, 1) };
    let first = own.saturating_sub(radius);
    let last = (own + radius).min(end - 1);
    let (mut sums, mut alpha) = ([0; 3], 0);
    let mut at = first;
    while at <= last {
        // A pixel counts as much as it is opaque: what cannot be seen has no color.
        let [r, g, b, a] = unsafe { *from.add(start + at * stride) }.to_le_bytes().map(u32::from);
        sums = [sums[0] + r * a, sums[1] + g * a, sums[2] + b * a];
        alpha += a;
        at += 1;
    }
    let count = (last - first + 1) as u32;
    let [r, g, b] = sums.map(|sum| mean(sum, alpha));
    unsafe { *to.add(y * width + x) = pixel([r, g, b, mean(alpha, count)]) }
}

/// To the nearest.
#[inline(always)]
fn mean(sum: u32, count: u32) -> u32 {
    (sum + count / 2) / count.max(1)
}

#[inline(always)]
fn pixel([r, g, b, a]: [u32; 4]) -> u32 {
    r | g << 8 | b << 16 | a << 24
}
