//! Who may prepare a request: text and media from separate stocks, so that a flood of images does not delay text.

use std::sync::Arc;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Bodies from this length are counted with media: decoding base64 and long prompts take their time.
const HEAVY_BYTES: usize = 256 << 10;
/// What a body with media has in it.
const MEDIA_MARKS: [&[u8]; 2] = [b"_url\"", b"input_audio\""];

/// Requests prepared at a time.
pub struct Permits {
    text: Arc<Semaphore>,
    media: Arc<Semaphore>,
}

impl Permits {
    /// `threads` for text, and half as many, one at least, for media.
    pub fn new(threads: usize) -> Self {
        let stock = |count: usize| Arc::new(Semaphore::new(count.max(1)));
        Self { text: stock(threads), media: stock(media_threads(threads)) }
    }

    /// Waits for a permit to prepare `body`.
    ///
    /// # Errors
    /// Never: the stocks are not closed.
    pub async fn take(&self, body: &[u8]) -> Result<OwnedSemaphorePermit, AcquireError> {
        let stock = if is_heavy(body) { &self.media } else { &self.text };
        Arc::clone(stock).acquire_owned().await
    }
}

/// Of the threads that prepare requests, those for media; they come on top.
pub fn media_threads(threads: usize) -> usize {
    threads.div_ceil(2)
}

fn is_heavy(body: &[u8]) -> bool {
    let has = |mark: &&[u8]| body.windows(mark.len()).any(|window| window == *mark);
    body.len() >= HEAVY_BYTES || MEDIA_MARKS.iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_flood_of_images_takes_no_permit_of_text() {
        let permits = Permits::new(4);
        let image = br#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:"}}]}]}"#;
        let held = [permits.take(image).await.unwrap(), permits.take(image).await.unwrap()];
        let third = futures_util::FutureExt::now_or_never(permits.take(image));
        assert!(third.is_none());
        let texts: Vec<_> = (0..4).map(|_| futures_util::FutureExt::now_or_never(permits.take(b"{}"))).collect();
        assert!(texts.iter().all(Option::is_some));
        drop(held);
        assert!(futures_util::FutureExt::now_or_never(permits.take(image)).is_some());
    }

    #[test]
    fn long_bodies_and_media_are_heavy() {
        assert!(is_heavy(&[b' '; HEAVY_BYTES]) && !is_heavy(&[b' '; HEAVY_BYTES - 1]));
        assert!(is_heavy(br#"{"type":"input_audio","x":1}"#) && !is_heavy(br#"{"content":"an image url"}"#));
        assert_eq!([1, 2, 3, 8].map(media_threads), [1, 1, 2, 4]);
    }
}
