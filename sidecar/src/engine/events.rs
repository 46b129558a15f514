//! One rank's KV events over ZMQ: a SUB socket for live batches, a new DEALER for each replay.
//!
//! **Invariant:** the reconnect is ours. `zeromq` retries with a back-off of up to 30 s that cannot be set, and hides that the
//! peer may be another engine life; so at the first `Disconnected` the socket is dropped and a new one is dialled.
//! Wire: vLLM 0.32 `distributed/kv_events.py`; live `[topic, seq, payload]`, replay `["", (topic,) seq, payload]`.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::Instant;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::discover::ZmqLink;

/// Pause between two dials.
const RETRY: Duration = Duration::from_millis(200);
/// Dial and ZMTP handshake.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Sequence number of the end marker: −1.
const END: u64 = u64::MAX;

#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub seq: u64,
    pub payload: Bytes,
}

#[derive(Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// A publisher is there: perhaps a new engine life.
    Connected,
    Frame(Frame),
    /// A message without sequence number and payload.
    Malformed,
    Disconnected,
}

/// Live events of one rank. `next` is cancel-safe and never ends.
pub trait EventSource: Send {
    type Replay: ReplayStream;
    fn next(&mut self) -> impl Future<Output = SourceEvent> + Send;
    /// Gives up the present connection; `Connected` follows when a new one stands.
    fn reconnect(&mut self);
    /// Asks for everything from `from` on.
    fn replay(&mut self, from: u64) -> impl Future<Output = Result<Self::Replay, ReplayError>> + Send;
}

/// Answers to one replay request, in order. `None` = the end marker came. `next` is cancel-safe, and may wait for ever.
pub trait ReplayStream: Send {
    fn next(&mut self) -> impl Future<Output = Result<Option<Frame>, ReplayError>> + Send;
}

#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error("the engine has no replay endpoint; start it with one, or set events.replay_endpoint")]
    None,
    #[error("replay: cannot connect to {endpoint}")]
    Dial {
        endpoint: String,
        #[source]
        source: zeromq::ZmqError,
    },
    #[error("replay: no reply within {limit:?}")]
    Silent { limit: Duration },
    #[error("replay: a reply has no sequence number and payload")]
    Malformed,
    #[error("replay: the connection broke")]
    Broken(#[source] zeromq::ZmqError),
}

type Monitor = futures_util::stream::BoxStream<'static, SocketEvent>;

pub struct ZmqSource {
    link: ZmqLink,
    socket: Option<(SubSocket, Monitor)>,
    /// Not before this moment: a publisher that closes may take one more connection, and forget it.
    dial_at: Option<Instant>,
}

impl ZmqSource {
    pub fn new(link: ZmqLink) -> Self {
        Self { link, socket: None, dial_at: None }
    }
}

async fn open(link: ZmqLink) -> Result<(SubSocket, Monitor), zeromq::ZmqError> {
    let mut options = SocketOptions::default();
    options.connect_timeout(DIAL_TIMEOUT);
    let mut socket = SubSocket::with_options(options);
    let monitor = socket.monitor().boxed();
    socket.subscribe(&link.topic).await?;
    if link.bind {
        socket.bind(&link.endpoint).await?;
    } else {
        socket.connect(&link.endpoint).await?;
    }
    Ok((socket, monitor))
}

impl EventSource for ZmqSource {
    type Replay = ZmqReplay;

    async fn next(&mut self) -> SourceEvent {
        loop {
            let Some((socket, monitor)) = &mut self.socket else {
                if let Some(at) = self.dial_at {
                    tokio::time::sleep_until(at).await;
                    self.dial_at = None;
                }
                match tokio::time::timeout(DIAL_TIMEOUT, open(self.link.clone())).await {
                    Ok(Ok(opened)) => {
                        self.socket = Some(opened);
                        if !self.link.bind {
                            return SourceEvent::Connected;
                        }
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(endpoint = self.link.endpoint, %error, "cannot open the event socket");
                        self.dial_at = Some(Instant::now() + RETRY);
                    }
                    Err(_) => tracing::debug!(endpoint = self.link.endpoint, "event socket took too long to open"),
                }
                continue;
            };
            tokio::select! {
                biased;
                event = monitor.next() => match event {
                    Some(SocketEvent::Accepted(..)) => return SourceEvent::Connected,
                    Some(SocketEvent::Disconnected(_)) | None => {
                        if !self.link.bind {
                            self.socket = None;
                            self.dial_at = Some(Instant::now() + RETRY / 2);
                        }
                        return SourceEvent::Disconnected;
                    }
                    Some(_) => {}
                },
                message = socket.recv() => match message {
                    Ok(message) => return frame(message).map_or(SourceEvent::Malformed, SourceEvent::Frame),
                    Err(error) => {
                        tracing::debug!(endpoint = self.link.endpoint, %error, "event socket failed");
                        self.socket = None;
                        return SourceEvent::Disconnected;
                    }
                },
            }
        }
    }

    fn reconnect(&mut self) {
        self.socket = None;
    }

    async fn replay(&mut self, from: u64) -> Result<ZmqReplay, ReplayError> {
        let endpoint = self.link.replay.clone().ok_or(ReplayError::None)?;
        let mut options = SocketOptions::default();
        options.connect_timeout(DIAL_TIMEOUT);
        let mut socket = DealerSocket::with_options(options);
        match tokio::time::timeout(DIAL_TIMEOUT, socket.connect(&endpoint)).await {
            Ok(dialled) => dialled.map_err(|source| ReplayError::Dial { endpoint, source })?,
            Err(_) => return Err(ReplayError::Silent { limit: DIAL_TIMEOUT }),
        }
        // Without the empty delimiter vLLM gives no answer.
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
        socket.send(request).await.map_err(ReplayError::Broken)?;
        Ok(ZmqReplay { socket })
    }
}

pub struct ZmqReplay {
    socket: DealerSocket,
}

impl ReplayStream for ZmqReplay {
    async fn next(&mut self) -> Result<Option<Frame>, ReplayError> {
        let frame = frame(self.socket.recv().await.map_err(ReplayError::Broken)?).ok_or(ReplayError::Malformed)?;
        Ok((frame.seq != END).then_some(frame))
    }
}

/// Sequence number and payload are the last two frames, whatever comes before.
fn frame(message: ZmqMessage) -> Option<Frame> {
    let mut frames = message.into_vecdeque();
    let payload = frames.pop_back()?;
    let seq = u64::from_be_bytes(frames.pop_back()?.as_ref().try_into().ok()?);
    Some(Frame { seq, payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(frames: &[&[u8]]) -> Option<(u64, Vec<u8>)> {
        let frames: Vec<Bytes> = frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect();
        frame(ZmqMessage::try_from(frames).unwrap()).map(|frame| (frame.seq, frame.payload.to_vec()))
    }

    #[test]
    fn replies_are_read_from_the_end() {
        let seq = 258u64.to_be_bytes();
        assert_eq!(parsed(&[b"topic", &seq, b"x"]), Some((258, b"x".to_vec())));
        assert_eq!(parsed(&[b"", b"topic", &seq, b"x"]), Some((258, b"x".to_vec())));
        assert_eq!(parsed(&[b"", &seq, b"x"]), Some((258, b"x".to_vec())));
        assert_eq!(parsed(&[b"", b"", &[0xff; 8], b""]), Some((END, Vec::new())));
    }

    #[test]
    fn a_message_without_sequence_number_is_none() {
        for frames in [&[&b"x"[..]][..], &[b"", b"x"], &[b"topic", b"123", b"x"]] {
            assert_eq!(parsed(frames), None);
        }
    }
}
