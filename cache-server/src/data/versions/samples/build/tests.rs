use super::*;
use fletch_core::manifest::EntryKind;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// An entry: its sample (none, one of its own, or that of a key), its size, and its chunks.
type Row = (u8, u32, Vec<u32>);

const CHUNKS: u32 = 24;

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = (0u8..5, any::<u32>(), proptest::collection::vec(0..CHUNKS, 0..4));
    proptest::collection::vec(row, 1..700)
}

fn sample_of(kind: u8) -> SampleRef<'static> {
    match kind {
        0 => SampleRef::None,
        1 | 2 => SampleRef::Single,
        3 => SampleRef::Keyed("a"),
        _ => SampleRef::Keyed("b"),
    }
}

fn built(rows: &[Row]) -> Result<Samples, SamplesError> {
    let mut build = Build::default();
    for (ordinal, (kind, size, chunks)) in (0u64..).zip(rows) {
        let entry = EntryRef {
            path: "",
            kind: EntryKind::File,
            size: u64::from(*size) * 3,
            hash: None,
            target: "",
            sample: sample_of(*kind),
        };
        build.entry(ordinal, &entry, chunks.iter().map(|&c| Ok(c)))?;
    }
    build.close();
    let chunk = |c: u32| Chunk { hash: Hash::of(&c.to_le_bytes()), len: c + 1, part: 0, row: c };
    units(build, &(0..CHUNKS).map(chunk).collect::<Vec<_>>())
}

/// The samples of the rows, found in the plainest way: (first ordinal, span, size, chunks).
fn expected(rows: &[Row]) -> Vec<(u64, u32, u64, Vec<u32>)> {
    let mut samples: Vec<(SampleRef<'_>, u64, u64, u64, Vec<u32>)> = Vec::new();
    for (ordinal, (kind, size, chunks)) in (0u64..).zip(rows) {
        let (sample, size) = (sample_of(*kind), u64::from(*size) * 3);
        match (sample, samples.last_mut()) {
            (SampleRef::None, _) => {}
            (SampleRef::Keyed(_), Some(last)) if last.0 == sample => {
                (last.2, last.3) = (ordinal, last.3 + size.min(u32::MAX.into()));
                last.4.extend(chunks);
            }
            _ => samples.push((sample, ordinal, ordinal, size.min(u32::MAX.into()), chunks.clone())),
        }
    }
    let span = |first: u64, last: u64| u32::try_from(last - first + 1).expect("few rows");
    let told = samples
        .into_iter()
        .map(|(_, first, last, size, chunks)| (first, span(first, last), size.min(u32::MAX.into()), chunks));
    told.collect()
}

proptest! {
    #[test]
    fn samples_are_those_of_the_rows_and_come_back_from_their_pieces(rows in rows(), at in any::<usize>()) {
        let expected = expected(&rows);
        let Ok(samples) = built(&rows) else {
            prop_assert!(expected.is_empty());
            return Ok(());
        };
        prop_assert_eq!(samples.len(), expected.len() as u64);
        for (s, (first, span, size, chunks)) in (0u32..).zip(&expected) {
            prop_assert_eq!(samples.ordinals(s), (*first, *span));
            prop_assert_eq!(samples.bytes(s), *size);
            let of_unit: Vec<u32> = samples.chunks(samples.unit(s)).iter().map(|c| c.row).collect();
            prop_assert_eq!(of_unit.first(), chunks.first(), "its first bytes lie in its unit");
        }
        let all: Vec<u32> = samples.chunks.iter().map(|c| c.row).collect();
        prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "no chunk is in two units");

        let pieces = samples.to_pieces();
        prop_assert_eq!(Samples::of_pieces(&pieces), Some(samples));
        let mut fewer = pieces.clone();
        fewer.remove(at % pieces.len());
        prop_assert_eq!(Samples::of_pieces(&fewer), None);
        let mut shorter = pieces;
        let piece = at % shorter.len();
        if shorter[piece].pop().is_some() {
            prop_assert_eq!(Samples::of_pieces(&shorter), None);
        }
    }
}
