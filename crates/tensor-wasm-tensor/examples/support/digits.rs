//! Pictures of digits, 28 by 28: drawn with strokes that are bent, turned, slanted, scaled, moved and blurred by
//! chance, or read from files in the format of MNIST. What is drawn is no MNIST, but as little a linear problem: see
//! the comparison that the example `mlp` prints.

use std::path::Path;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tensor_wasm_tensor::nn::Module;
use tensor_wasm_tensor::{DType, Tensor, no_grad};

use super::Outcome;
use super::options::{Flag, Options};
use super::training::Score;

/// Rows and columns of a picture.
pub(crate) const SIDE: usize = 28;

pub(crate) const PIXELS: usize = SIDE * SIDE;

pub(crate) const CLASSES: usize = 10;

/// Drawn pictures to train with, and to be judged by.
const TRAINED: usize = 24_000;
const JUDGED: usize = 4_000;

/// Pictures that are judged at once.
const JUDGED_AT_ONCE: usize = 500;

/// What examples with digits take.
pub(crate) const FLAGS: &[Flag] = &[
    Flag { name: "images", value: "FILE", about: "pictures to train with, an IDX file as MNIST has (drawn ones)" },
    Flag { name: "labels", value: "FILE", about: "their digits, an IDX file" },
    Flag { name: "test-images", value: "FILE", about: "pictures to be judged by (a sixth of the others)" },
    Flag { name: "test-labels", value: "FILE", about: "their digits" },
];

/// Pictures `[count, 784]` with their digits.
pub(crate) struct Digits {
    pixels: Tensor,
    labels: Vec<i64>,
}

/// A line through points, which is a curve if it is smooth. The box of a digit goes from 0 to 1, downwards.
struct Stroke {
    is_smooth: bool,
    points: &'static [(f32, f32)],
}

const fn curve(points: &'static [(f32, f32)]) -> Stroke {
    Stroke { is_smooth: true, points }
}

const fn corners(points: &'static [(f32, f32)]) -> Stroke {
    Stroke { is_smooth: false, points }
}

const FONT: [&[Stroke]; CLASSES] = [
    &[curve(&[
        (0.5, 0.03),
        (0.24, 0.16),
        (0.16, 0.5),
        (0.25, 0.85),
        (0.5, 0.97),
        (0.75, 0.84),
        (0.84, 0.5),
        (0.76, 0.16),
        (0.5, 0.03),
    ])],
    &[corners(&[(0.3, 0.25), (0.54, 0.04), (0.52, 0.96)])],
    &[
        curve(&[(0.2, 0.28), (0.3, 0.08), (0.55, 0.03), (0.77, 0.16), (0.74, 0.42), (0.5, 0.68), (0.18, 0.95)]),
        corners(&[(0.18, 0.95), (0.84, 0.94)]),
    ],
    &[curve(&[
        (0.2, 0.14),
        (0.46, 0.03),
        (0.74, 0.14),
        (0.72, 0.38),
        (0.44, 0.47),
        (0.75, 0.57),
        (0.8, 0.8),
        (0.5, 0.97),
        (0.17, 0.85),
    ])],
    &[corners(&[(0.66, 0.97), (0.66, 0.04), (0.15, 0.66), (0.86, 0.66)])],
    &[
        corners(&[(0.78, 0.05), (0.28, 0.05), (0.24, 0.45)]),
        curve(&[(0.24, 0.45), (0.52, 0.37), (0.78, 0.52), (0.79, 0.78), (0.52, 0.97), (0.18, 0.86)]),
    ],
    &[curve(&[
        (0.72, 0.06),
        (0.42, 0.2),
        (0.22, 0.55),
        (0.27, 0.87),
        (0.52, 0.97),
        (0.78, 0.82),
        (0.74, 0.58),
        (0.5, 0.48),
        (0.24, 0.64),
    ])],
    &[corners(&[(0.17, 0.06), (0.83, 0.05), (0.42, 0.96)])],
    &[curve(&[
        (0.5, 0.48),
        (0.26, 0.3),
        (0.3, 0.08),
        (0.5, 0.03),
        (0.7, 0.08),
        (0.74, 0.3),
        (0.5, 0.48),
        (0.22, 0.68),
        (0.26, 0.9),
        (0.5, 0.97),
        (0.74, 0.9),
        (0.78, 0.68),
        (0.5, 0.48),
    ])],
    &[curve(&[
        (0.76, 0.34),
        (0.52, 0.52),
        (0.26, 0.42),
        (0.22, 0.18),
        (0.48, 0.03),
        (0.74, 0.14),
        (0.77, 0.4),
        (0.68, 0.72),
        (0.5, 0.97),
    ])],
];

/// Straight parts of one span of a curve.
const PARTS: usize = 5;

impl Stroke {
    /// The corners of the line, after each of its points was moved a little by chance.
    fn line(&self, random: &mut StdRng) -> Vec<(f32, f32)> {
        let mut move_by = || random.random_range(-0.035..0.035_f32);
        let points: Vec<(f32, f32)> = self.points.iter().map(|(x, y)| (x + move_by(), y + move_by())).collect();
        if !self.is_smooth {
            return points;
        }
        let at = |n: usize| points[n.min(points.len() - 1)];
        let mut line = vec![points[0]];
        for span in 0..points.len() - 1 {
            // Through all points, after Catmull and Rom.
            let [p, q, r, s] = [at(span.saturating_sub(1)), at(span), at(span + 1), at(span + 2)];
            for part in 1..=PARTS {
                let t = part as f32 / PARTS as f32;
                let blend = |p: f32, q: f32, r: f32, s: f32| {
                    let (linear, square) = (r - p, 2.0 * p - 5.0 * q + 4.0 * r - s);
                    q + 0.5 * t * (linear + t * (square + t * (3.0 * (q - r) + s - p)))
                };
                line.push((blend(p.0, q.0, r.0, s.0), blend(p.1, q.1, r.1, s.1)));
            }
        }
        line
    }
}

/// Draws a digit by chance.
fn draw(digit: usize, random: &mut StdRng, pixels: &mut [f32]) {
    let (wide, high) = (random.random_range(10.0..18.0_f32), random.random_range(14.0..21.0_f32));
    let (slant, angle) = (random.random_range(-0.3..0.3_f32), random.random_range(-0.35..0.35_f32));
    let (right, down) = (random.random_range(-3.5..3.5_f32), random.random_range(-3.5..3.5_f32));
    let (radius, ink) = (random.random_range(0.5..1.5_f32), random.random_range(0.65..1.0_f32));
    let noise = random.random_range(0.0..0.3_f32);
    let centre = SIDE as f32 / 2.0;
    for stroke in FONT[digit] {
        let place = |(x, y): (f32, f32)| {
            let (x, y) = ((x - 0.5) * wide, (y - 0.5) * high);
            let x = x - slant * y;
            (centre + right + x * angle.cos() - y * angle.sin(), centre + down + x * angle.sin() + y * angle.cos())
        };
        let line: Vec<(f32, f32)> = stroke.line(random).into_iter().map(place).collect();
        line.windows(2).for_each(|ends| draw_segment(ends[0], ends[1], radius, ink, pixels));
    }
    for pixel in pixels {
        *pixel = (*pixel + random.random_range(-noise..=noise)).clamp(0.0, 1.0);
    }
}

/// Inks what is near a straight line.
fn draw_segment(a: (f32, f32), b: (f32, f32), radius: f32, ink: f32, pixels: &mut [f32]) {
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let square = (dx * dx + dy * dy).max(1e-6);
    let reach = radius + 1.0;
    let range = |a: f32, b: f32| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is clamped to the picture")]
        let at = |x: f32| x.clamp(0.0, SIDE as f32) as usize;
        at(a.min(b) - reach)..at(a.max(b) + reach + 1.0)
    };
    for row in range(a.1, b.1) {
        for column in range(a.0, b.0) {
            let (x, y) = (column as f32 + 0.5 - a.0, row as f32 + 0.5 - a.1);
            let along = ((x * dx + y * dy) / square).clamp(0.0, 1.0);
            let distance = ((x - along * dx).powi(2) + (y - along * dy).powi(2)).sqrt();
            let pixel = &mut pixels[row * SIDE + column];
            *pixel = pixel.max(ink * (radius + 0.5 - distance).clamp(0.0, 1.0));
        }
    }
}

impl Digits {
    /// Draws pictures; the same seed draws the same.
    pub(crate) fn drawn(count: usize, seed: u64) -> Digits {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut pixels, mut labels) = (vec![0.0; count * PIXELS], Vec::new());
        for picture in pixels.chunks_mut(PIXELS) {
            let digit = random.random_range(0..CLASSES);
            draw(digit, &mut random, picture);
            labels.push(i64::try_from(digit).unwrap_or_default());
        }
        Digits { pixels: Tensor::from_vec(pixels, &[count, PIXELS]), labels }
    }

    /// What to train with, and what to be judged by, as the options ask for it.
    pub(crate) fn of_options(options: &Options) -> Outcome<(Digits, Digits)> {
        let pair = |images: &str, labels: &str| match (options.get(images), options.get(labels)) {
            (Some(images), Some(labels)) => Digits::read(Path::new(images), Path::new(labels)).map(Some),
            (None, None) => Ok(None),
            _ => Err(format!("--{images} and --{labels} go together").into()),
        };
        match (pair("images", "labels")?, pair("test-images", "test-labels")?) {
            (Some(all), Some(judged)) => Ok((all, judged)),
            (Some(all), None) => {
                let count = all.count() - all.count() / 6;
                Ok((all.part(0, count), all.part(count, all.count() - count)))
            }
            (None, Some(_)) => Err("--test-images goes with --images".into()),
            (None, None) => {
                let judged = Digits::drawn(JUDGED, options.seed ^ 0x5eed_0000_0000);
                Ok((Digits::drawn(TRAINED, options.seed), judged))
            }
        }
    }

    /// Reads two IDX files: a magic number, sizes, all of them in four bytes with the largest first, then bytes.
    pub(crate) fn read(images: &Path, labels: &Path) -> Outcome<Digits> {
        let (sizes, pixels) = read_idx::<3>(images)?;
        let ([count], digits) = read_idx::<1>(labels)?;
        if sizes[1..] != [SIDE, SIDE] {
            let [_, rows, columns] = sizes;
            return Err(format!("{}: pictures of {rows} × {columns}, not {SIDE} × {SIDE}", images.display()).into());
        }
        if sizes[0] != count {
            return Err(
                format!("{} has {} pictures, {} {count} digits", images.display(), sizes[0], labels.display()).into()
            );
        }
        if let Some(digit) = digits.iter().find(|digit| usize::from(**digit) >= CLASSES) {
            return Err(format!("{}: {digit} is no digit", labels.display()).into());
        }
        let pixels: Vec<f32> = pixels.iter().map(|pixel| f32::from(*pixel) / 255.0).collect();
        let labels = digits.into_iter().map(i64::from).collect();
        Ok(Digits { pixels: Tensor::from_vec(pixels, &[count, PIXELS]), labels })
    }

    pub(crate) fn count(&self) -> usize {
        self.labels.len()
    }

    /// The pixels of a picture, from 0 to 1, and its digit.
    pub(crate) fn picture(&self, n: usize) -> Outcome<(Vec<f32>, i64)> {
        Ok((self.pixels.narrow(0, n, 1).to_vec()?, self.labels[n]))
    }

    fn part(&self, start: usize, count: usize) -> Digits {
        Digits { pixels: self.pixels.narrow(0, start, count), labels: self.labels[start..start + count].to_vec() }
    }

    /// How well a model does, which makes `[batch, 10]` of `[batch, 784]`.
    pub(crate) fn judge(&self, model: &dyn Module) -> Outcome<Score> {
        let (mut loss, mut right) = (0.0, 0);
        for start in (0..self.count()).step_by(JUDGED_AT_ONCE) {
            let part = self.part(start, JUDGED_AT_ONCE.min(self.count() - start));
            let target = Tensor::from_slice(&part.labels, &[part.count()]);
            let logits = no_grad(|| model.forward(&part.pixels));
            let hits = logits.argmax(1).eq(&target).sum(());
            let own = logits.cross_entropy(&target);
            Tensor::realize_all(&[&hits, &own])?;
            right += hits.item::<i64>()?;
            loss += own.cast(DType::F64).item::<f64>()? * part.count() as f64;
        }
        Ok(Score { loss: loss / self.count() as f64, accuracy: Some(right as f64 / self.count() as f64) })
    }
}

/// Batches without end: each epoch has every picture once, in an order by chance. What is left over of an epoch, being
/// too few for a batch, is left out.
pub(crate) struct Batches<'d> {
    digits: &'d Digits,
    labels: Tensor,
    size: usize,
    random: StdRng,
    order: Vec<i64>,
    used: usize,
}

impl<'d> Batches<'d> {
    pub(crate) fn new(digits: &'d Digits, size: usize, seed: u64) -> Batches<'d> {
        let order: Vec<i64> = (0..).take(digits.count()).collect();
        let labels = Tensor::from_slice(&digits.labels, &[digits.count()]);
        let used = order.len();
        Batches { digits, labels, size: size.min(used), random: StdRng::seed_from_u64(seed), order, used }
    }

    /// Pictures `[size, 784]` and their digits `[size]`.
    pub(crate) fn next(&mut self) -> (Tensor, Tensor) {
        if self.used + self.size > self.order.len() {
            self.order.shuffle(&mut self.random);
            self.used = 0;
        }
        let index = Tensor::from_slice(&self.order[self.used..self.used + self.size], &[self.size]);
        self.used += self.size;
        (self.digits.pixels.index_select(0, &index), self.labels.index_select(0, &index))
    }
}

fn read_idx<const RANK: usize>(path: &Path) -> Outcome<([usize; RANK], Vec<u8>)> {
    let shown = path.display();
    let bytes = std::fs::read(path).map_err(|why| format!("{shown}: {why}"))?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return Err(format!("{shown} is compressed: unpack it with gunzip first").into());
    }
    let number = |n: usize| bytes.get(4 * n..4 * n + 4).and_then(|four| four.try_into().ok()).map(u32::from_be_bytes);
    // Bytes, in so many axes.
    let magic = 0x0800 + u32::try_from(RANK)?;
    if number(0) != Some(magic) {
        return Err(
            format!("{shown} is no IDX file of bytes with {RANK} axes: it does not begin with {magic:#010x}").into()
        );
    }
    let mut sizes = [0; RANK];
    for (n, size) in sizes.iter_mut().enumerate() {
        *size = number(n + 1).ok_or_else(|| format!("{shown} ends before its sizes"))?.try_into()?;
    }
    let data = bytes[4 * (RANK + 1)..].to_vec();
    if sizes.iter().try_fold(1_usize, |all, size| all.checked_mul(*size)) != Some(data.len()) {
        return Err(format!("{shown} has {} bytes for sizes {sizes:?}", data.len()).into());
    }
    if data.is_empty() {
        return Err(format!("{shown} has nothing in it").into());
    }
    Ok((sizes, data))
}
