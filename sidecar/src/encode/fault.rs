//! Why a request's images are not encoded. Texts are fit for the client; what it must not read is logged where it arises.

use fovea_encoder::cache::GetError;
use fovea_encoder::error::EncodeError;
use fovea_encoder::handoff::HandOffError;
use fovea_encoder::tensor::CheckError;
use http::StatusCode;

/// `index` counts the request's images from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error(
        "image {index}: given by URL, and the encoder here takes bytes alone; send a `data:` URL, or set media.inline: true in balancer.yaml"
    )]
    Url { index: usize },
    #[error("image {index}: {problem}")]
    Data { index: usize, problem: String },
    #[error("image {index}: has more than {max} bytes; send a smaller one")]
    TooManyBytes { index: usize, max: u64 },
    #[error("image {index}: of {width}x{height} has more than {max} pixels; scale it down")]
    TooManyPixels { index: usize, width: u32, height: u32, max: u64 },
    #[error("{found} images, and {max} are taken in one request; send fewer")]
    TooManyImages { found: usize, max: usize },
    #[error("{field}: changes what an engine calls an image, and is not taken where an encoder stands; leave it out")]
    Options { field: &'static str },
    #[error("video beside images is not taken where an encoder stands; send them apart")]
    Video,
    /// Rows of one image under another's name would be served to others.
    #[error("image {index}: the balancer's name for it is not the one that its bytes and the encoder here give")]
    Misnamed { index: usize },
    #[error("{0}")]
    Encode(EncodeError),
    #[error("image {index}: another request encodes it and takes too long; try again")]
    TooSlow { index: usize },
    #[error("image {index}: the encoder gave rows that the engine cannot take")]
    Unfit { index: usize },
    #[error("no room to hand images to the engine; try again")]
    HandOffBusy,
    #[error("images cannot be handed to the engine")]
    HandOffBroken,
    #[error("the encoder is not ready; try again")]
    NotReady,
    #[error("the encoder failed")]
    Internal,
}

impl Fault {
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Url { .. } | Self::Data { .. } | Self::Options { .. } | Self::Video | Self::Misnamed { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::TooManyBytes { .. } | Self::TooManyPixels { .. } | Self::TooManyImages { .. } => {
                StatusCode::PAYLOAD_TOO_LARGE
            }
            Self::Encode(error) => StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            Self::TooSlow { .. } | Self::HandOffBusy | Self::NotReady => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unfit { .. } | Self::HandOffBroken | Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// `type` of the error answer.
    pub fn kind(&self) -> &'static str {
        match self.status().as_u16() {
            400 => "image_refused",
            413 => "image_too_large",
            503 => "encoder_busy",
            _ => "encoder_error",
        }
    }

    pub(super) fn unfit(index: usize, error: &CheckError) -> Self {
        tracing::error!(index, %error, "an encoder's rows do not fit the engine");
        Self::Unfit { index }
    }

    pub(super) fn got(index: usize, error: GetError<Self>) -> Self {
        match error {
            // The one who was joined may have had it at another place.
            GetError::Failed(Self::Encode(EncodeError::Item { index: Some(_), error })) => {
                Self::Encode(EncodeError::Item { index: Some(index), error })
            }
            GetError::Failed(Self::Unfit { .. }) => Self::Unfit { index },
            GetError::Failed(other) => other,
            GetError::TooSlow { .. } => Self::TooSlow { index },
        }
    }
}

impl From<HandOffError> for Fault {
    fn from(error: HandOffError) -> Self {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        tracing::error!(%error, cause, "an image cannot be handed to the engine");
        if error.status() == 503 { Self::HandOffBusy } else { Self::HandOffBroken }
    }
}
