//! Multimodal workloads, of the shapes of Dynamo's benchmark generators: reuse of images at given rates, a sliding window, one product
//! photo, questions on documents, a shared system prompt.

use super::random::Random;
use super::workload::{Prompt, Request, Workload};

/// Tokens per KV block of the simulated engines.
const BLOCK: u32 = 32;
/// Tokens of the answers.
const OUTPUT: u32 = 48;
/// Tokens that Qwen3-VL makes of common sizes: 640×360, 1280×720, 1920×1080, 1024², 768×1024, 512², 800×1216, 320².
const SIZES: [u32; 8] = [220, 880, 2040, 1024, 768, 256, 950, 100];
/// An A4 page at 150 dpi, about.
const PAGE: u32 = 2000;
/// The product photo, 1024².
const PHOTO: u32 = 1024;

struct Maker {
    random: Random,
    images: u64,
}

impl Maker {
    fn new(seed: u64) -> Self {
        Self { random: Random::new(seed), images: seed << 32 }
    }

    /// A new image: (id, tokens).
    fn image(&mut self) -> (u64, u32) {
        self.images += 1;
        (self.images, SIZES[self.random.below(SIZES.len())])
    }

    fn ask(&mut self, prompt: Prompt, session: u64, words: f64) -> Request {
        let mut prompt = prompt;
        let tokens = self.random.around(words, words / 4.0);
        prompt.text(self.random.number(), tokens);
        prompt.request(BLOCK, session, OUTPUT)
    }
}

/// Every turn shows the user's last five images: 8 turns each.
pub fn window(users: usize, seed: u64) -> Workload {
    const TURNS: usize = 8;
    const WINDOW: usize = 5;
    let mut make = Maker::new(seed);
    let albums: Vec<Vec<_>> = (0..users).map(|_| (0..WINDOW + TURNS - 1).map(|_| make.image()).collect()).collect();
    let mut requests = Vec::new();
    for turn in 0..TURNS {
        let mut order: Vec<usize> = (0..users).collect();
        make.random.shuffle(&mut order);
        for user in order {
            let mut prompt = Prompt::begin();
            albums[user][turn..turn + WINDOW].iter().for_each(|(id, tokens)| prompt.image(*id, *tokens));
            requests.push(make.ask(prompt, user as u64, 30.0));
        }
    }
    Workload::new("window", BLOCK, requests, &mut make.random)
}

/// Everybody asks about one photo, at a rate that would keep three workers busy; the rest ask about images of their own.
pub fn photo(count: usize, workers: usize, utilisation: f64, seed: u64) -> Workload {
    /// Tokens of work of one question on the photo where it is cached, and of one on an image of one's own, decoding left out.
    const QUESTION: f64 = 240.0;
    const OWN: f64 = 1700.0;
    let hot_work = (3.0 / (utilisation * workers as f64)).min(1.0);
    let hot_share = hot_work * OWN / (hot_work * OWN + (1.0 - hot_work) * QUESTION);
    let mut make = Maker::new(seed);
    let photo = make.image().0;
    let requests = (0..count).map(|user| {
        let (mut prompt, hot) = (Prompt::begin(), make.random.unit() < hot_share);
        let (id, tokens) = if hot { (photo, PHOTO) } else { make.image() };
        prompt.image(id, tokens);
        let words = if hot { 200.0 } else { 30.0 };
        Request { hot, ..make.ask(prompt, user as u64, words) }
    });
    let requests = requests.collect();
    Workload::new("photo", BLOCK, requests, &mut make.random)
}

/// Six questions about each page, by different people, in no order.
pub fn documents(count: usize, seed: u64) -> Workload {
    const QUESTIONS: usize = 6;
    let mut make = Maker::new(seed);
    let mut pages: Vec<u64> =
        (0..count.div_ceil(QUESTIONS)).flat_map(|_| std::iter::repeat_n(make.image().0, QUESTIONS)).collect();
    make.random.shuffle(&mut pages);
    let ask = |(user, page): (u64, &u64)| {
        let mut prompt = Prompt::begin();
        prompt.image(*page, PAGE);
        make.ask(prompt, user, 30.0)
    };
    let requests = (0..).zip(&pages).map(ask).collect();
    Workload::new("documents", BLOCK, requests, &mut make.random)
}

/// Each request's image is one of those before with a chance of `percent` in a hundred.
pub fn reuse(name: &'static str, count: usize, percent: u32, seed: u64) -> Workload {
    let mut make = Maker::new(seed);
    let mut known: Vec<(u64, u32)> = Vec::new();
    let mut requests = Vec::new();
    for user in 0..count as u64 {
        let again = make.random.unit() * 100.0 < f64::from(percent) && !known.is_empty();
        let (id, tokens) = if again {
            known[make.random.below(known.len())]
        } else {
            let image = make.image();
            known.push(image);
            image
        };
        let mut prompt = Prompt::begin();
        prompt.image(id, tokens);
        requests.push(make.ask(prompt, user, 30.0));
    }
    Workload::new(name, BLOCK, requests, &mut make.random)
}

/// One system prompt of 1500 tokens for all; images are new.
pub fn system_prompt(count: usize, seed: u64) -> Workload {
    const SYSTEM: u32 = 1500;
    let mut make = Maker::new(seed);
    let mut requests = Vec::new();
    for user in 0..count as u64 {
        let mut prompt = Prompt::begin();
        prompt.text(1, SYSTEM);
        let (id, tokens) = make.image();
        prompt.image(id, tokens);
        requests.push(make.ask(prompt, user, 30.0));
    }
    Workload::new("system_prompt", BLOCK, requests, &mut make.random)
}
