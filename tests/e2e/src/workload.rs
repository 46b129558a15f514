//! Multimodal requests that look like use: chats that grow by pictures, and pictures that many people ask about.

use std::fmt::Write as _;
use std::io::Cursor;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

/// A picture as a data URL. Equal seeds give equal bytes, and no two seeds share content; small, since 8 equal bytes follow each other.
pub fn picture(seed: u64, width: u32, height: u32) -> String {
    data_url("image/png", &png(seed, width, height, 8))
}

/// A picture that does not compress: its file has as many bytes as its pixels.
pub fn noise_png(seed: u64, width: u32, height: u32) -> Vec<u8> {
    png(seed, width, height, 1)
}

fn png(seed: u64, width: u32, height: u32, repeat: usize) -> Vec<u8> {
    let mut noise = vec![0; (width * height * 3) as usize];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut noise);
    let pixels: Vec<u8> = (0..noise.len()).map(|i| noise[i / repeat]).collect();
    let mut file = Cursor::new(Vec::new());
    image::write_buffer_with_format(&mut file, &pixels, width, height, image::ColorType::Rgb8, image::ImageFormat::Png)
        .expect("an RGB buffer of the right length");
    file.into_inner()
}

pub fn data_url(mime: &str, bytes: &[u8]) -> String {
    format!("data:{mime};base64,{}", base64_simd::STANDARD.encode_to_string(bytes))
}

pub fn image_part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

pub fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A sentence of `words` words that no other seed gives.
pub fn words(seed: u64, words: usize) -> String {
    let list = [
        "red", "house", "near", "the", "river", "small", "bird", "two", "green", "cars", "on", "wide", "street", "old",
        "tree", "light",
    ];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = String::new();
    for _ in 0..words {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let _ = write!(text, "{} ", list[(state % list.len() as u64) as usize]);
    }
    text
}

/// One request of a workload.
#[derive(Clone, Debug)]
pub struct Request {
    /// Pause before it is sent.
    pub think: Duration,
    pub body: Bytes,
}

/// A streamed chat request with usage.
pub fn chat(user: &str, messages: &[Value], max_tokens: u32) -> Bytes {
    let body = json!({
        "model": "tiny-vl", "user": user, "messages": messages, "max_tokens": max_tokens, "stream": true,
        "stream_options": {"include_usage": true},
    });
    Bytes::from(body.to_string())
}

/// Size of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// People who talk at the same time.
    pub users: u64,
    /// Turns of each chat.
    pub turns: u64,
    /// Sets of pictures that people share (product photos, the pages of a manual); each is asked about by many.
    pub shared: u64,
    /// Pictures of one set.
    pub pictures: u64,
    /// Longest pause of a person between an answer and the next question; pauses are spread evenly up to it.
    pub think_max: Duration,
    pub seed: u64,
}

impl Shape {
    pub const FULL: Self =
        Self { users: 24, turns: 6, shared: 6, pictures: 3, think_max: Duration::from_millis(1600), seed: 1 };
    pub const SHORT: Self =
        Self { users: 8, turns: 4, shared: 3, pictures: 2, think_max: Duration::from_millis(800), seed: 1 };

    pub fn requests(self) -> u64 {
        self.users * self.turns
    }

    /// Pause before a turn.
    pub fn think(self, user: u64, turn: u64) -> Duration {
        let mut random = blake3::Hasher::new();
        random.update(&self.seed.to_le_bytes()).update(&user.to_le_bytes()).update(&turn.to_le_bytes());
        self.think_max * u32::from(random.finalize().as_bytes()[0]) / 255
    }

    /// All requests of one user in order: each turn adds a question to the history. Every user begins with a shared set of pictures under
    /// the same system prompt; every second turn brings a picture of the user's own.
    pub fn user(self, user: u64) -> Vec<Request> {
        let set = (self.seed << 32) | ((user % self.shared) << 8);
        let system =
            json!({"role": "system", "content": format!("You answer questions about pictures. {}", words(7, 60))});
        let mut messages = vec![system];
        let mut requests = Vec::new();
        for turn in 0..self.turns {
            let question = words((self.seed << 40) | (user << 20) | turn, 24);
            let mut parts = Vec::new();
            if turn == 0 {
                parts.extend((0..self.pictures).map(|i| image_part(&picture(set | i, 768, 640))));
            } else if turn % 2 == 0 {
                parts.push(image_part(&picture((self.seed << 48) | (user << 24) | (turn << 8), 448, 320)));
            }
            parts.push(text_part(&question));
            messages.push(json!({"role": "user", "content": parts}));
            requests.push(Request { think: self.think(user, turn), body: chat(&format!("user-{user}"), &messages, 8) });
            messages.push(json!({"role": "assistant", "content": words((self.seed << 41) | (user << 20) | turn, 12)}));
        }
        requests
    }
}

/// One request with four pictures, for the repeat check.
pub fn four_pictures(seed: u64) -> Bytes {
    let mut parts: Vec<Value> = (0..4).map(|i| image_part(&picture(seed + i, 448, 320))).collect();
    parts.push(text_part("Compare the four pictures."));
    chat("repeat", &[json!({"role": "user", "content": parts})], 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_pictures() {
        assert_eq!(picture(3, 64, 32), picture(3, 64, 32));
        assert_ne!(picture(3, 64, 32), picture(4, 64, 32));
    }

    #[test]
    fn a_turn_repeats_all_before_it() {
        let requests = Shape::SHORT.user(2);
        let messages = |i: usize| {
            serde_json::from_slice::<Value>(&requests[i].body).unwrap()["messages"].as_array().unwrap().clone()
        };
        assert_eq!(messages(1)[..2], messages(0)[..]);
    }
}
