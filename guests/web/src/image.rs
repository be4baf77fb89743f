//! Images, from PNG and to it.

use std::io::Cursor;

use png::{ColorType, Compression, Decoder, Encoder, Limits, Transformations};

/// Pixels are red, green, blue, alpha.
pub struct Image {
    pub width: u32,
    pub height: u32,
    pub pixels: Vec<[u8; 4]>,
}

impl Image {
    /// Of an animation it is the first image.
    pub fn decode(bytes: &[u8], side_max: u32) -> Result<Image, String> {
        let bad = |error| format!("the body is not a PNG that can be read: {error}");
        let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), Limits { bytes: 128 << 20 });
        decoder.set_transformations(Transformations::normalize_to_color8());
        let mut reader = decoder.read_info().map_err(bad)?;
        let (width, height) = reader.info().size();
        if width > side_max || height > side_max {
            return Err(format!("the image is {width} by {height}, and the most is {side_max} by {side_max}"));
        }
        let bytes = reader.output_buffer_size().ok_or("the image is too large")?;
        let mut decoded = vec![0; bytes];
        let frame = reader.next_frame(&mut decoded).map_err(bad)?;
        let decoded = &decoded[..frame.buffer_size()];
        let pixels = match frame.color_type {
            ColorType::Rgba => decoded.as_chunks().0.to_vec(),
            ColorType::Rgb => decoded.as_chunks().0.iter().map(|[r, g, b]| [*r, *g, *b, 255]).collect(),
            ColorType::GrayscaleAlpha => decoded.as_chunks().0.iter().map(|[v, a]| [*v, *v, *v, *a]).collect(),
            ColorType::Grayscale => decoded.iter().map(|v| [*v, *v, *v, 255]).collect(),
            ColorType::Indexed => return Err("the image's palette was not resolved".to_owned()),
        };
        Ok(Image { width, height, pixels })
    }

    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(ColorType::Rgba);
        // Somebody waits for it.
        encoder.set_compression(Compression::Fast);
        let written = encoder.write_header().and_then(|mut writer| {
            writer.write_image_data(self.pixels.as_flattened())?;
            writer.finish()
        });
        match written {
            Ok(()) => Ok(bytes),
            Err(error) => Err(format!("the image could not be written: {error}")),
        }
    }
}
