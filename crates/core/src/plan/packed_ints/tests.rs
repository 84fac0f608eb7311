use super::*;
use proptest::prelude::*;

/// Numbers as they occur: any, close together, or ascending.
fn numbers() -> impl Strategy<Value = Vec<u32>> {
    let ascending = proptest::collection::vec(0u32..5000, 0..900).prop_map(|steps| {
        let mut at = 0;
        steps
            .iter()
            .map(|step| {
                at += step;
                at
            })
            .collect()
    });
    prop_oneof![
        proptest::collection::vec(any::<u32>(), 0..900),
        proptest::collection::vec(prop_oneof![Just(0), Just(u32::MAX)], 0..900),
        proptest::collection::vec(1_000_000u32..1_000_200, 0..900),
        ascending,
    ]
}

proptest! {
    #[test]
    fn a_packed_list_has_the_numbers_that_it_was_given(numbers in numbers()) {
        let packed: PackedInts = numbers.iter().copied().collect();
        prop_assert_eq!(packed.len(), numbers.len());
        prop_assert_eq!(packed.iter().collect::<Vec<_>>(), numbers);
        prop_assert_eq!(PackedInts::of_bytes(&packed.to_bytes()), Some(packed));
    }

    #[test]
    fn numbers_that_ascend_are_counted(mut numbers in numbers(), n in any::<u32>()) {
        numbers.sort_unstable();
        let packed: PackedInts = numbers.iter().copied().collect();
        let among = numbers.get(n as usize % numbers.len().max(1)).copied().unwrap_or(n);
        for n in [n, among] {
            prop_assert_eq!(packed.count_at_most(n), numbers.partition_point(|&x| x <= n));
        }
    }

    /// Bytes that nobody wrote give a list or none, and a list that answers.
    #[test]
    fn other_bytes_are_refused_or_read(
        numbers in numbers(),
        at in any::<usize>(),
        bit in 0u32..8,
        cut in any::<bool>(),
    ) {
        let mut bytes = numbers.iter().copied().collect::<PackedInts>().to_bytes();
        let at = at % bytes.len();
        if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
        if let Some(read) = PackedInts::of_bytes(&bytes) {
            prop_assert_eq!(read.iter().count(), read.len());
        }
    }
}

#[test]
fn what_counts_evenly_takes_no_bits() {
    for step in [0, 1, 7] {
        let packed: PackedInts = (0..1_000_000).map(|n| n * step).collect();
        assert!(packed.footprint() < 1_000_000 / 8, "{step}: {}", packed.footprint());
    }
    // Lengths of 30,000 to 95,000 bytes: 16 bits each.
    let packed: PackedInts =
        (0..1_000_000u32).map(|n| 30_000 + n.wrapping_mul(2_654_435_761) % 65_000).collect();
    assert!(packed.footprint() < 2_200_000, "{}", packed.footprint());
}
