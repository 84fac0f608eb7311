use super::*;

fn frame(kind: u8, status: u16, index: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = FrameHeader { kind, status, index, len: payload.len() as u64 }.encode().to_vec();
    out.extend_from_slice(payload);
    out
}

/// Three items: a whole one, one in two frames, a failed one, and a frame of unknown kind between them.
fn stream() -> Vec<u8> {
    let mut s = PREFACE.to_vec();
    s.extend(frame(1, WHOLE, 0, b"abc"));
    s.extend(frame(99, 7, 0, b"from the future"));
    s.extend(frame(1, MORE, 1, b"de"));
    s.extend(frame(1, WHOLE, 1, b""));
    s.extend(frame(2, 404, 2, b"{}"));
    s.extend(frame(3, WHOLE, 3, b""));
    s
}

fn expected() -> Vec<Frame> {
    let data = |index, whole, b: &'static [u8]| Frame::Data { index, whole, bytes: Bytes::from_static(b) };
    vec![
        data(0, true, b"abc"),
        data(1, false, b"de"),
        data(1, true, b""),
        Frame::Error { index: 2, status: 404, problem: Bytes::from_static(b"{}") },
        Frame::End { items: 3 },
    ]
}

fn decode(pieces: impl Iterator<Item = Bytes>) -> Result<Vec<Frame>, BadFrames> {
    let mut d = Decoder::new(100);
    let mut out = Vec::new();
    for p in pieces {
        d.feed(p);
        while let Some(f) = d.next_frame()? {
            out.push(f);
        }
    }
    d.finish()?;
    Ok(out)
}

#[test]
fn golden_bytes() {
    let hex: String = stream().iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(
        hex,
        concat!(
            "464c5446524d0100",
            "0101c800000000000300000000000000616263",
            "63010700000000000f0000000000000066726f6d2074686520667574757265",
            "0101ce000100000002000000000000006465",
            "0101c800010000000000000000000000",
            "0201940102000000020000000000000",
            "07b7d",
            "0301c800030000000000000000000000",
        )
    );
}

#[test]
fn every_cut_in_transit_gives_the_same_frames() {
    let s = Bytes::from(stream());
    for step in 1..=s.len() {
        let pieces = (0..s.len()).step_by(step).map(|i| s.slice(i..(i + step).min(s.len())));
        assert_eq!(decode(pieces), Ok(expected()), "pieces of {step}");
    }
}

#[test]
fn every_truncation_is_noticed() {
    let s = Bytes::from(stream());
    for end in 0..s.len() {
        assert_eq!(decode([s.slice(..end)].into_iter()), Err(BadFrames::Cut), "cut at {end}");
    }
}

#[test]
fn foreign_newer_long_and_trailing_streams_are_errors() {
    let s = stream();
    let one = |v: Vec<u8>| decode([Bytes::from(v)].into_iter());
    let mut foreign = s.clone();
    foreign[0] = b'X';
    assert_eq!(one(foreign), Err(BadFrames::Magic));
    let mut newer = s.clone();
    newer[6] = 2;
    assert_eq!(one(newer), Err(BadFrames::Major(2)));
    let mut long = PREFACE.to_vec();
    long.extend(frame(1, WHOLE, 0, &[0; 101]));
    assert_eq!(one(long), Err(BadFrames::TooLong { len: 101, max: 100 }));
    let mut trailing = s;
    trailing.push(0);
    assert_eq!(one(trailing), Err(BadFrames::AfterEnd));
}

#[test]
fn a_payload_inside_one_piece_is_not_copied() {
    let s = Bytes::from(stream());
    let mut d = Decoder::new(100);
    d.feed(s.clone());
    let Ok(Some(Frame::Data { bytes, .. })) = d.next_frame() else { panic!("data first") };
    let at = PREFACE.len() + HEADER_BYTES;
    assert_eq!(bytes.as_ptr(), s[at..].as_ptr());
}

#[test]
fn a_leases_frames_and_signs_of_life() {
    let mut s = PREFACE.to_vec();
    s.extend(frame(6, WHOLE, 0, b"{g}"));
    s.extend(frame(5, WHOLE, 0, b""));
    s.extend(frame(7, WHOLE, 0, b"{s}"));
    s.extend(frame(1, WHOLE, 0, b"abc"));
    s.extend(frame(7, WHOLE, 1, b"{t}"));
    s.extend(frame(4, WHOLE, 1, b"{r}"));
    s.extend(frame(3, WHOLE, 2, b""));
    let b = |b: &'static [u8]| Bytes::from_static(b);
    let want = vec![
        Frame::Grant { grant: b(b"{g}") },
        Frame::Sample { index: 0, head: b(b"{s}") },
        Frame::Data { index: 0, whole: true, bytes: b(b"abc") },
        Frame::Sample { index: 1, head: b(b"{t}") },
        Frame::Ref { index: 1, location: b(b"{r}") },
        Frame::End { items: 2 },
    ];
    assert_eq!(decode([Bytes::from(s)].into_iter()), Ok(want));
}
