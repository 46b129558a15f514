//! Frames between sidecar and balancer, both ways, in two pushes, and the preamble of a request.
#![no_main]

use fovea_gossip::codec::{Decoder, Wire};
use fovea_gossip::message::{FromBalancer, FromSidecar};
use fovea_gossip::preamble;
use libfuzzer_sys::fuzz_target;

/// Messages until the bytes end or are none.
fn drain<M: Wire>(bytes: &[u8]) {
    let mut decoder = Decoder::<M>::new();
    for piece in [&bytes[..bytes.len() / 2], &bytes[bytes.len() / 2..]] {
        decoder.push(piece);
        loop {
            match decoder.next() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    drain::<FromSidecar>(bytes);
    drain::<FromBalancer>(bytes);
    if let Ok(read) = preamble::decode(bytes) {
        assert_eq!(preamble::decode(&preamble::encode(&read)).as_ref(), Ok(&read));
    }
});
