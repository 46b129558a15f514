//! Why an encoder gave no embeddings. Each error says what to tell the client and what only the log may hear.

use std::fmt;

/// Longest message of an encoder that a client is shown, in characters.
pub const MESSAGE_CHARS_MAX: usize = 500;

/// Why one image has no embedding. The text of each is fit for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemError {
    /// The client's fault, in words that the client may read.
    Invalid(String),
    /// In the encoder's unit of cost.
    TooLarge { cost: u64, max: u64 },
    /// The image alone does not fit into the memory that is free at present.
    OutOfMemory,
    /// The encoder was lost while it had the image.
    Unavailable,
    /// Our fault or the encoder's: the words are for the log alone.
    Internal(String),
}

impl ItemError {
    /// What went wrong, with all that the client must not read.
    pub fn detail(&self) -> String {
        match self {
            Self::Internal(detail) => detail.clone(),
            other => other.to_string(),
        }
    }
}

impl fmt::Display for ItemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(message) => message.chars().take(MESSAGE_CHARS_MAX).try_for_each(|c| write!(f, "{c}")),
            Self::TooLarge { cost, max } => {
                write!(f, "it costs the encoder {cost}, which takes {max} at once: send fewer or smaller images")
            }
            Self::OutOfMemory => {
                f.write_str("the encoder has too little memory for it: try again or send a smaller one")
            }
            Self::Unavailable => f.write_str("the encoder was lost on the way: try again"),
            Self::Internal(_) => f.write_str("the encoder failed on it"),
        }
    }
}

impl std::error::Error for ItemError {}

/// Why a whole batch has no embeddings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The batch is halved and each half tried.
    #[error("encoder is out of memory")]
    OutOfMemory,
    /// The encoder found fault with some image and did not say which.
    #[error("encoder refused the batch: {0}")]
    Invalid(String),
    /// The encoder is gone and comes back by itself.
    #[error("encoder is not available: {0}")]
    Unavailable(String),
    /// The encoder is gone for good.
    #[error("encoder lost its device: {0}")]
    DeviceLost(String),
    #[error("encoder failed: {0}")]
    Internal(String),
}

/// Why a backend did not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Names the field and the remedy.
    #[error("{0}")]
    Config(String),
    #[error("encoder did not start: {0}")]
    Failed(String),
}

/// Why a request has no embeddings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// `index` counts the request's images from 0; `None` when the encoder named none.
    #[error("{}: {error}", named(*.index))]
    Item { index: Option<usize>, error: ItemError },
    #[error("encoder queue is full ({queued} of {max}): try again")]
    Busy { queued: u64, max: u64 },
    #[error("encoder is not available: try again")]
    Unavailable,
    #[error("request was cancelled")]
    Cancelled,
    #[error("encoder is shutting down: try again")]
    Closed,
}

fn named(index: Option<usize>) -> String {
    index.map_or_else(|| "images".to_owned(), |index| format!("image {index}"))
}

/// Labels of metrics: a closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    Invalid,
    TooLarge,
    OutOfMemory,
    Unavailable,
    Internal,
    Busy,
    Cancelled,
    Closed,
}

impl ErrorKind {
    pub const ALL: [Self; 8] = [
        Self::Invalid,
        Self::TooLarge,
        Self::OutOfMemory,
        Self::Unavailable,
        Self::Internal,
        Self::Busy,
        Self::Cancelled,
        Self::Closed,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::TooLarge => "too_large",
            Self::OutOfMemory => "out_of_memory",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
            Self::Busy => "busy",
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
        }
    }
}

impl EncodeError {
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Item { error, .. } => match error {
                ItemError::Invalid(_) => ErrorKind::Invalid,
                ItemError::TooLarge { .. } => ErrorKind::TooLarge,
                ItemError::OutOfMemory => ErrorKind::OutOfMemory,
                ItemError::Unavailable => ErrorKind::Unavailable,
                ItemError::Internal(_) => ErrorKind::Internal,
            },
            Self::Busy { .. } => ErrorKind::Busy,
            Self::Unavailable => ErrorKind::Unavailable,
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Closed => ErrorKind::Closed,
        }
    }

    /// HTTP status of the answer; its body may be this error's text.
    pub fn status(&self) -> u16 {
        match self.kind() {
            ErrorKind::Invalid => 400,
            ErrorKind::TooLarge => 413,
            ErrorKind::Internal => 500,
            // The client that cancelled reads no answer; 499 stands in the logs.
            ErrorKind::Cancelled => 499,
            ErrorKind::OutOfMemory | ErrorKind::Unavailable | ErrorKind::Busy | ErrorKind::Closed => 503,
        }
    }

    /// Seconds for `Retry-After`, when another try may succeed.
    pub fn retry_after_s(&self) -> Option<u32> {
        (self.status() == 503).then_some(1)
    }

    /// What went wrong, with all that the client must not read.
    pub fn detail(&self) -> String {
        match self {
            Self::Item { index, error } => format!("{}: {}", named(*index), error.detail()),
            other => other.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(error: ItemError, status: u16, text: &str) {
        let error = EncodeError::Item { index: Some(2), error };
        assert_eq!((error.status(), error.to_string().as_str()), (status, text));
    }

    #[test]
    fn a_clients_fault_is_told_word_for_word() {
        check(ItemError::Invalid("expected RGB".into()), 400, "image 2: expected RGB");
    }

    #[test]
    fn an_encoders_fault_is_kept_from_the_client() {
        let secret = ItemError::Internal("/models/secret.pt: KeyError".into());
        check(secret.clone(), 500, "image 2: the encoder failed on it");
        assert!(EncodeError::Item { index: None, error: secret }.detail().contains("KeyError"));
    }

    #[test]
    fn what_may_pass_by_itself_asks_for_another_try() {
        for error in [EncodeError::Busy { queued: 1, max: 1 }, EncodeError::Unavailable, EncodeError::Closed] {
            assert_eq!((error.status(), error.retry_after_s()), (503, Some(1)));
        }
    }

    #[test]
    fn a_long_message_is_cut() {
        assert_eq!(ItemError::Invalid("é".repeat(9999)).to_string().chars().count(), MESSAGE_CHARS_MAX);
    }
}
