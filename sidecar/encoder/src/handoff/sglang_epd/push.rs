//! Sends what [`super::rendezvous`] matched: one ZMQ message, over a PUSH socket that connects to the receiver.

use std::time::Duration;

use tokio::time::timeout;
use zeromq::{PushSocket, Socket, SocketSend, ZmqError, ZmqMessage};

use super::rendezvous::Send;

/// Why a receiver did not get its rows. Its request times out in the engine; others go on.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    #[error("rows not sent to {to} within {wait_ms} ms: is the engine up?")]
    TooSlow { to: String, wait_ms: u128 },
    #[error("rows cannot be sent to {to}")]
    Socket {
        to: String,
        #[source]
        source: ZmqError,
    },
}

/// Connects, sends and closes. The rows are not copied by us.
///
/// # Errors
/// When the receiver cannot be reached or does not take the message in time.
pub async fn push(send: Send, wait_max: Duration) -> Result<(), PushError> {
    let to = send.to.to_string();
    let exchange = async {
        let mut socket = PushSocket::new();
        socket.connect(&to).await?;
        let mut message = ZmqMessage::from(send.frames.head);
        if let Some(rows) = send.frames.rows {
            message.push_back(rows);
        }
        socket.send(message).await?;
        socket.close().await.into_iter().next().map_or(Ok(()), Err)
    };
    match timeout(wait_max, exchange).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(source)) => Err(PushError::Socket { to, source }),
        Err(_) => Err(PushError::TooSlow { to, wait_ms: wait_max.as_millis() }),
    }
}
