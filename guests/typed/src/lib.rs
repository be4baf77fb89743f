//! A component with exported functions of every WIT type that JSON can carry.

use std::sync::atomic::{AtomicU32, Ordering};

wit_bindgen::generate!({ world: "typed" });

use exports::demo::typed::numbers::Guest as Numbers;
use exports::demo::typed::shapes::{Color, Guest as Shapes, Marks, Point, Shape};

struct Typed;

static CALLS: AtomicU32 = AtomicU32::new(0);

impl Guest for Typed {
    fn greet(name: String) -> String {
        format!("Hello, {name}!")
    }

    fn upper(bytes: Vec<u8>) -> Vec<u8> {
        bytes.to_ascii_uppercase()
    }

    fn text(bytes: Vec<u8>) -> Result<String, String> {
        String::from_utf8(bytes).map_err(|e| e.to_string())
    }

    fn initial(text: String) -> Option<char> {
        text.chars().next()
    }

    /// How often this instance was called: 1 unless it is reused.
    fn counter() -> u32 {
        CALLS.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn big(bytes: u32) -> Vec<u8> {
        vec![7; bytes as usize]
    }

    fn shout(text: String) {
        for word in text.split(' ') {
            println!("{}!", word.to_uppercase());
        }
    }
}

impl Shapes for Typed {
    fn area(s: Shape) -> f64 {
        match s {
            Shape::Circle(radius) => std::f64::consts::PI * radius * radius,
            Shape::Rect((width, height)) => width * height,
            Shape::Nothing => 0.0,
        }
    }

    fn centroid(points: Vec<Point>) -> Result<Point, String> {
        if points.is_empty() {
            return Err("no points".to_owned());
        }
        let n = points.len() as f64;
        let (x, y) = points.iter().fold((0.0, 0.0), |(x, y), p| (x + p.x, y + p.y));
        let labels: Vec<&str> = points.iter().filter_map(|p| p.label.as_deref()).collect();
        let label = (!labels.is_empty()).then(|| labels.join("+"));
        Ok(Point { x: x / n, y: y / n, label })
    }

    fn mix(a: Color, b: Color) -> Color {
        match (a, b) {
            (Color::Red, Color::Green) | (Color::Green, Color::Red) => Color::Blue,
            (a, _) => a,
        }
    }

    fn invert(m: Marks) -> Marks {
        !m
    }

    fn rest(bytes: Vec<u8>) -> Result<Vec<u8>, Color> {
        bytes.get(1..).map(<[u8]>::to_vec).ok_or(Color::Red)
    }
}

impl Numbers for Typed {
    fn ints(a: i8, b: u8, c: i16, d: u16, e: i32, f: u32, g: i64, h: u64) -> (i8, u8, i16, u16, i32, u32, i64, u64) {
        (a, b, c, d, e, f, g, h)
    }

    fn floats(a: f32, b: f64) -> (f32, f64) {
        (a, b)
    }

    fn maybe(a: Option<u32>, b: Option<Option<u32>>) -> Option<Option<u32>> {
        match (a, b) {
            (Some(a), Some(Some(b))) => Some(Some(a + b)),
            (_, other) => other,
        }
    }

    fn divide(a: i32, b: i32) -> Result<i32, String> {
        a.checked_div(b).ok_or_else(|| format!("{a} / {b} has no answer"))
    }

    fn no_payload(ok: bool) -> Result<(), ()> {
        if ok { Ok(()) } else { Err(()) }
    }
}

export!(Typed);
