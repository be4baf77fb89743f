//! A chart of lines and dots as SVG: axes with ticks at round numbers, a grid, labels, and a legend.

use std::fmt::Write;

/// Of the whole picture, in pixels.
const WIDTH: f64 = 840.0;
const HEIGHT: f64 = 480.0;

/// Around the area of the curves, for ticks and labels.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 52.0;
const BOTTOM: f64 = 58.0;

/// Values further apart than this are shown by their logarithms.
const LINEAR_RATIO_MAX: f64 = 60.0;

/// Colours that people who see few colours can tell apart.
const COLORS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

pub(crate) struct Chart<'c> {
    pub title: &'c str,
    pub x: &'c str,
    pub y: &'c str,
    pub series: Vec<Series<'c>>,
}

pub(crate) struct Series<'c> {
    pub name: &'c str,
    pub points: Vec<(f64, f64)>,
    pub look: Look,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Look {
    Line,
    /// A line with a mark at each of its few points.
    Marked,
    Dots,
}

/// Where numbers are along an axis.
struct Axis {
    from: f64,
    to: f64,
    ticks: Vec<f64>,
    is_log: bool,
}

impl Axis {
    /// Ticks at multiples of 1, 2 or 5 times a power of ten; the axis begins and ends at one.
    fn linear(low: f64, high: f64, count: f64) -> Axis {
        let span = if high > low { high - low } else { 1.0 };
        let power = 10_f64.powf((span / count).log10().floor());
        let fits = |step: &f64| span / step <= count;
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(fits).unwrap_or(10.0 * power);
        let (first, last) = ((low / step).floor(), ((low + span) / step).ceil());
        let mut ticks = vec![first * step];
        while let Some(tick) = ticks.last().map(|tick| (tick / step).round() + 1.0).filter(|n| *n <= last) {
            ticks.push(tick * step);
        }
        Axis { from: first * step, to: last * step, ticks, is_log: false }
    }

    /// Ticks at 1, 2 and 5 times powers of ten.
    fn logarithmic(low: f64, high: f64) -> Axis {
        let mut ticks = Vec::new();
        let mut power = 10_f64.powf(low.log10().floor());
        while power <= high * 10.0 {
            ticks.extend([1.0, 2.0, 5.0].map(|n| n * power));
            power *= 10.0;
        }
        let from = ticks.iter().copied().filter(|tick| *tick <= low).fold(ticks[0], f64::max);
        let to = ticks.iter().copied().filter(|tick| *tick >= high).fold(f64::INFINITY, f64::min);
        ticks.retain(|tick| (from..=to).contains(tick));
        Axis { from, to, ticks, is_log: true }
    }

    /// From 0 at one end to 1 at the other.
    fn part(&self, value: f64) -> f64 {
        if self.is_log {
            (value / self.from).ln() / (self.to / self.from).ln()
        } else {
            (value - self.from) / (self.to - self.from)
        }
    }

    fn across(&self, x: f64) -> f64 {
        LEFT + self.part(x) * (WIDTH - LEFT - RIGHT)
    }

    fn up(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - self.part(y) * (HEIGHT - TOP - BOTTOM)
    }
}

/// A number without the digits that say nothing.
fn short(value: f64) -> String {
    if value.abs() >= 10_000.0 && value % 1000.0 == 0.0 {
        return format!("{}k", value / 1000.0);
    }
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

impl Chart<'_> {
    pub(crate) fn svg(&self) -> String {
        let mut svg = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut svg);
        svg
    }

    fn axes(&self) -> (Axis, Axis) {
        let of = |pick: fn(&(f64, f64)) -> f64| {
            let values = self.series.iter().flat_map(|series| &series.points).map(pick);
            let values = values.filter(|value| value.is_finite());
            let (low, high) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
            if low <= high { (low, high) } else { (0.0, 1.0) }
        };
        let (left, right) = of(|point| point.0);
        let (low, high) = of(|point| point.1);
        let is_log = low > 0.0 && high / low > LINEAR_RATIO_MAX;
        // Zero is the natural lower end where it is near.
        let base = if low > 0.0 && low < 0.5 * high { 0.0 } else { low };
        let y = if is_log { Axis::logarithmic(low, high) } else { Axis::linear(base, high, 7.0) };
        (Axis::linear(left, right, 10.0), y)
    }

    fn write(&self, svg: &mut String) -> std::fmt::Result {
        let (x, y) = self.axes();
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let size = format!("width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\"");
        let font = "font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"#333\"";
        writeln!(svg, "<svg xmlns=\"http://www.w3.org/2000/svg\" {size} {font}>")?;
        writeln!(svg, "<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>")?;
        let title = escaped(self.title);
        writeln!(svg, "<text x=\"{LEFT}\" y=\"26\" font-size=\"17\" font-weight=\"600\">{title}</text>")?;
        for tick in &x.ticks {
            let (at, label) = (x.across(*tick), short(*tick));
            writeln!(svg, "<path d=\"M{at:.1} {TOP}V{bottom}\" stroke=\"#e6e6e6\"/>")?;
            writeln!(svg, "<path d=\"M{at:.1} {bottom}v5\" stroke=\"#333\"/>")?;
            writeln!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 20.0)?;
        }
        for tick in &y.ticks {
            let (at, label) = (y.up(*tick), short(*tick));
            writeln!(svg, "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#e6e6e6\"/>")?;
            writeln!(svg, "<path d=\"M{LEFT} {at:.1}h-5\" stroke=\"#333\"/>")?;
            writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 9.0, at + 4.5)?;
        }
        writeln!(svg, "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#333\"/>")?;
        let (middle, centre) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
        let (across, up) = (escaped(self.x), escaped(self.y));
        let suffix = if y.is_log { " (logarithmic)" } else { "" };
        writeln!(svg, "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{across}</text>", HEIGHT - 14.0)?;
        let turned = format!("transform=\"translate(20 {centre}) rotate(-90)\" text-anchor=\"middle\"");
        writeln!(svg, "<text {turned}>{up}{suffix}</text>")?;
        for (n, series) in self.series.iter().enumerate() {
            series.write(svg, &x, &y, COLORS[n % COLORS.len()])?;
            self.legend(svg, n, series)?;
        }
        writeln!(svg, "</svg>")
    }

    /// One line of the legend, at the upper right: the title leaves room there, and losses fall.
    fn legend(&self, svg: &mut String, n: usize, series: &Series<'_>) -> std::fmt::Result {
        // About how wide a letter is.
        let width = |series: &Series<'_>| 44.0 + 7.4 * series.name.chars().count() as f64;
        let at = WIDTH - RIGHT - self.series[n..].iter().map(width).sum::<f64>();
        let color = COLORS[n % COLORS.len()];
        if series.look != Look::Dots {
            writeln!(svg, "<path d=\"M{at:.1} 41h22\" stroke=\"{color}\" stroke-width=\"2.5\"/>")?;
        }
        if series.look != Look::Line {
            writeln!(svg, "<circle cx=\"{:.1}\" cy=\"41\" r=\"3.5\" fill=\"{color}\"/>", at + 11.0)?;
        }
        writeln!(svg, "<text x=\"{:.1}\" y=\"45.5\">{}</text>", at + 28.0, escaped(series.name))
    }
}

impl Series<'_> {
    fn write(&self, svg: &mut String, x: &Axis, y: &Axis, color: &str) -> std::fmt::Result {
        let is_shown = |point: &&(f64, f64)| point.0.is_finite() && point.1.is_finite();
        let points: Vec<(f64, f64)> =
            self.points.iter().filter(is_shown).map(|point| (x.across(point.0), y.up(point.1))).collect();
        if self.look != Look::Dots {
            let places: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let places = places.join(" ");
            let style = format!("fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-linejoin=\"round\"");
            writeln!(svg, "<polyline points=\"{places}\" {style}/>")?;
        }
        if self.look != Look::Line {
            let radius = if self.look == Look::Dots { 2.0 } else { 3.5 };
            for (x, y) in &points {
                writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{color}\"/>")?;
            }
        }
        Ok(())
    }
}
