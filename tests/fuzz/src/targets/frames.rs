//! Frames: the answers to batches and lease requests, with the JSON in them.

use super::golden_bytes;
use crate::plant;
use bytes::Bytes;
use fletch_api::{
    LeaseGrant, Problem, SampleHead, SampleRef,
    frames::{BadFrames, Decoder, Frame, FrameHeader, FrameKind, MORE, PREFACE, WHOLE},
};

/// The longest payload that the decoder takes here, in bytes.
const PAYLOAD_MAX: u64 = 64 << 10;

pub fn seeds() -> Vec<Vec<u8>> {
    let mut lease = PREFACE.to_vec();
    let mut frame = |kind, status, index, payload: &[u8]| {
        lease.extend_from_slice(&FrameHeader::new(kind, status, index, payload.len() as u64).encode());
        lease.extend_from_slice(payload);
    };
    frame(
        FrameKind::Grant,
        WHOLE,
        0,
        br#"{"status":"granted","lease":7,"entries":[3,4],"ttl_ms":9,"left":2}"#,
    );
    frame(FrameKind::Sample, WHOLE, 0, br#"{"entry":3,"sample":3,"ordinal":3,"copy":0,"files":[]}"#);
    frame(FrameKind::Data, MORE, 0, b"ab");
    frame(FrameKind::Heartbeat, WHOLE, 0, b"");
    frame(FrameKind::Data, WHOLE, 0, b"c");
    frame(FrameKind::Ref, WHOLE, 1, br#"{"pieces":[],"owner":"a:1"}"#);
    frame(FrameKind::End, WHOLE, 2, b"");
    vec![golden_bytes("frames.bin"), lease]
}

/// A stream decodes in the same way in one piece and in many. Frames that are encoded again decode again.
pub fn run(input: &[u8]) -> bool {
    let whole = decode(input, usize::MAX);
    assert_eq!(decode(input, 7), whole, "pieces change the frames");
    let (frames, end) = whole;
    let again = decode(&encode(&frames), 61);
    assert_eq!((&again.0, again.1), (&frames, None));
    for frame in &frames {
        match frame {
            Frame::Grant { grant } => drop(serde_json::from_slice::<LeaseGrant>(grant)),
            Frame::Sample { head, .. } => drop(serde_json::from_slice::<SampleHead>(head)),
            Frame::Ref { location, .. } => drop(serde_json::from_slice::<SampleRef>(location)),
            Frame::Error { problem, .. } => drop(serde_json::from_slice::<Problem>(problem)),
            Frame::Data { .. } | Frame::End { .. } => {}
        }
    }
    let errors = frames.iter().filter(|f| matches!(f, Frame::Error { .. })).count();
    plant::bug(errors == 2 || frames.iter().any(|f| matches!(f, Frame::Ref { index, .. } if *index > 9)));
    end.is_none() && !frames.is_empty()
}

fn decode(input: &[u8], piece: usize) -> (Vec<Frame>, Option<BadFrames>) {
    let mut decoder = Decoder::new(PAYLOAD_MAX);
    let mut frames = Vec::new();
    for bytes in input.chunks(piece.min(input.len()).max(1)) {
        decoder.feed(Bytes::copy_from_slice(bytes));
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(e) => return (frames, Some(e)),
            }
        }
    }
    (frames, None)
}

fn encode(frames: &[Frame]) -> Vec<u8> {
    let mut out = PREFACE.to_vec();
    for frame in frames {
        let (kind, status, index, payload) = match frame {
            Frame::Data { index, whole, bytes } => {
                (FrameKind::Data, if *whole { WHOLE } else { MORE }, *index, bytes.clone())
            }
            Frame::Error { index, status, problem } => (FrameKind::Error, *status, *index, problem.clone()),
            Frame::Grant { grant } => (FrameKind::Grant, WHOLE, 0, grant.clone()),
            Frame::Sample { index, head } => (FrameKind::Sample, WHOLE, *index, head.clone()),
            Frame::Ref { index, location } => (FrameKind::Ref, WHOLE, *index, location.clone()),
            Frame::End { items } => (FrameKind::End, WHOLE, *items, Bytes::new()),
        };
        out.extend_from_slice(&FrameHeader::new(kind, status, index, payload.len() as u64).encode());
        out.extend_from_slice(&payload);
    }
    out
}
