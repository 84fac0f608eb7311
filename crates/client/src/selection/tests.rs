use super::*;
use parquet::{
    data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type},
    file::{properties::WriterProperties, writer::SerializedFileWriter},
    schema::parser::parse_message_type,
};

fn columns(keys: Option<&str>, numbers: Option<&str>, weights: Option<&str>) -> Columns {
    let own = |x: Option<&str>| x.map(str::to_owned);
    Columns { keys: own(keys), numbers: own(numbers), weights: own(weights) }
}

fn defaults() -> Columns {
    Columns::default()
}

fn csv_of(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), text).expect("write");
    file
}

/// A Parquet file in two row groups with the columns `key`, `number`, `w` and one that is not read.
fn parquet_of(rows: &[(&str, i64, f64)]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("file");
    let schema = "message m { REQUIRED BYTE_ARRAY key (UTF8); REQUIRED INT64 number; OPTIONAL DOUBLE w; \
                  REQUIRED INT64 other; }";
    let schema = Arc::new(parse_message_type(schema).expect("schema"));
    let properties = WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
    let out = file.reopen().expect("reopen");
    let mut writer = SerializedFileWriter::new(out, schema, Arc::new(properties)).expect("writer");
    for half in rows.chunks(rows.len().div_ceil(2)) {
        let mut group = writer.next_row_group().expect("group");
        let mut column = group.next_column().expect("column").expect("one");
        let keys: Vec<ByteArray> = half.iter().map(|r| r.0.into()).collect();
        column.typed::<ByteArrayType>().write_batch(&keys, None, None).expect("write");
        column.close().expect("closed");
        let numbers: Vec<i64> = half.iter().map(|r| r.1).collect();
        let mut column = group.next_column().expect("column").expect("one");
        column.typed::<Int64Type>().write_batch(&numbers, None, None).expect("write");
        column.close().expect("closed");
        // NaN becomes a missing weight.
        let weights: Vec<f64> = half.iter().map(|r| r.2).filter(|w| !w.is_nan()).collect();
        let there: Vec<i16> = half.iter().map(|r| i16::from(!r.2.is_nan())).collect();
        let mut column = group.next_column().expect("column").expect("one");
        column.typed::<DoubleType>().write_batch(&weights, Some(&there), None).expect("write");
        column.close().expect("closed");
        let mut column = group.next_column().expect("column").expect("one");
        column.typed::<Int64Type>().write_batch(&vec![7; half.len()], None, None).expect("write");
        column.close().expect("closed");
        group.close().expect("closed");
    }
    writer.close().expect("closed");
    file
}

fn rejection(file: &Path, columns: &Columns) -> String {
    let e = Selection::read(file, columns).expect_err("no selection");
    assert!(matches!(e.kind(), Kind::Invalid | Kind::NotFound));
    e.to_string()
}

#[test]
fn parquet_and_csv_say_the_same() {
    let rows = [("b/2", 5, 1.5), ("a,1", 3, 0.0), ("ü\"", 0, 2.0)];
    let table = parquet_of(&rows);
    let text = csv_of("w,key,number,other\n1.5,b/2,5,x\n0,\"a,1\",3,y\n2e0,\"ü\"\"\",0,z\n");
    for file in [table.path(), text.path()] {
        let read = |c: Columns| Selection::read(file, &c).expect("a selection");
        let keys = || rows.iter().map(|r| r.0.to_owned()).collect::<Vec<_>>();
        assert_eq!(read(defaults()).base(None), PlanBase::Keys(keys()), "key before number");
        assert_eq!(read(columns(None, Some("number"), None)).base(None), PlanBase::Samples(vec![5, 3, 0]));
        let weighted = read(columns(Some("key"), None, Some("w")));
        assert_eq!((weighted.len(), weighted.is_empty()), (3, false));
        let weights = Weights {
            weights: vec![Some(1.5), Some(0.0), Some(2.0)],
            draws: 3,
            of: Some(WeightOf::Keys(keys())),
        };
        assert_eq!(weighted.clone().base(None), PlanBase::Weights(weights.clone()));
        assert_eq!(weighted.base(Some(10)), PlanBase::Weights(Weights { draws: 10, ..weights }));
        // A missing column: the error lists the columns of the file.
        let why = rejection(file, &columns(Some("path"), None, None));
        assert!(why.contains("has no column path; it has "), "{why}");
        for there in ["key", "number", "w", "other"] {
            assert!(why.contains(there), "{why}");
        }
        assert!(rejection(file, &columns(None, None, Some("weight"))).contains("has no column weight"));
        assert!(rejection(file, &columns(Some("key"), Some("number"), None)).contains("not both"));
    }
}

#[test]
fn an_invalid_file_is_rejected_with_the_row() {
    let why = |text: &str, c: Columns| rejection(csv_of(text).path(), &c);
    let numbers = || columns(None, Some("number"), None);
    assert!(why("key\na\n\"\"\n", defaults()).contains("row 2: \"\" in column key is not a key"));
    assert!(
        why("number\n1\n-2\n", numbers()).contains("row 2: \"-2\" in column number is not a sample number")
    );
    assert!(why("number\n1.5\n", defaults()).contains("row 1: \"1.5\""));
    for weight in ["-1", "NaN", "inf", "x", ""] {
        let text = format!("key,w\na,1\nb,{weight}\n");
        let why = why(&text, columns(None, None, Some("w")));
        assert!(why.contains("row 2: ") && why.contains("is not a weight"), "{why}");
    }
    assert!(why("key\n", defaults()).contains("has no rows"));
    assert!(why("key,w\na\n", defaults()).contains("record 1"), "rows of unequal length");
    assert!(why("path\na\n", defaults()).contains("no column key or number; it has path"));
    let twice = "key\na\nb\na\nc\nb\na\nd\nd\ne\ne\nf\nf\ng\ng\n";
    let said = why(twice, defaults());
    assert!(
        said.ends_with(r#"names 6 samples more than once, among them "a", "b", "d", "e", "f""#),
        "{said}"
    );
    let table = parquet_of(&[("a", 1, 1.0), ("b", -1, f64::NAN), ("c", 1, 1.0)]);
    let said = |c: Columns| rejection(table.path(), &c);
    assert!(said(numbers()).contains("row 2: -1 in column number"));
    assert!(said(columns(None, None, Some("w"))).contains("row 2: nothing in column w"));
    let table = parquet_of(&[("a", 1, 1.0), ("b", 2, 1.0), ("c", 1, 1.0)]);
    assert!(rejection(table.path(), &numbers()).contains("names 1 samples more than once, among them 1"));
    let cut = std::fs::read(table.path()).expect("bytes");
    std::fs::write(table.path(), &cut[..cut.len() - 9]).expect("write");
    assert!(rejection(table.path(), &defaults()).contains("cannot be read as Parquet"));
    assert!(rejection(Path::new("/nowhere/at/all.csv"), &defaults()).contains("/nowhere/at/all.csv"));
}

#[test]
fn a_file_cannot_claim_more_rows_than_its_bytes_can_name() {
    let same = vec![("a", 1, 0.5); 200_000];
    let file = parquet_of(&same);
    assert!(file.as_file().metadata().expect("length").len() < 6000, "a dictionary of one value");
    let e = Selection::read(file.path(), &defaults()).expect_err("refused").to_string();
    assert!(e.contains("it claims 200000 rows in"), "{e}");
}

#[test]
fn the_end_of_a_parquet_file_may_say_anything() {
    let file = parquet_of(&[("a", 1, 0.5), ("b", 2, 1.0)]);
    let good = std::fs::read(file.path()).expect("bytes");
    let end = good.len() - 8;
    for (len, mark) in
        [(0_u32, *b"PAR1"), (3, *b"PAR1"), (u32::MAX, *b"PAR1"), (end as u32 + 1, *b"PAR1"), (40, *b"PARE")]
    {
        let bad = [&good[..end], &len.to_le_bytes(), &mark].concat();
        std::fs::write(file.path(), bad).expect("write");
        let e = Selection::read(file.path(), &defaults()).expect_err("refused");
        assert!(matches!(e, SelectionError::Format { .. }), "{e}");
    }
    std::fs::write(file.path(), b"PAR1").expect("write");
    assert!(Selection::read(file.path(), &defaults()).is_err());
}

/// A Parquet file with one column, of strings that a dictionary has.
fn column_of(kind: &str, keys: &[&str], levels: Option<(&[i16], &[i16])>) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("file");
    let schema = Arc::new(parse_message_type(&format!("message m {{ {kind} }}")).expect("schema"));
    let properties = WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
    let out = file.reopen().expect("reopen");
    let mut writer = SerializedFileWriter::new(out, schema, Arc::new(properties)).expect("writer");
    let mut group = writer.next_row_group().expect("group");
    let mut column = group.next_column().expect("column").expect("one");
    let keys: Vec<ByteArray> = keys.iter().map(|key| (*key).into()).collect();
    let (defined, repeated) = levels.unzip();
    column.typed::<ByteArrayType>().write_batch(&keys, defined, repeated).expect("write");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
    file
}

#[test]
fn a_file_takes_memory_for_distinct_samples_only() {
    let long = "k".repeat(PATH_BYTES_MAX);
    let key = "REQUIRED BYTE_ARRAY key (UTF8);";
    let file = column_of(key, &vec![&*long; 4000], None);
    assert!(file.as_file().metadata().expect("length").len() < 20_000, "one long key");
    let e = Selection::read(file.path(), &defaults()).expect_err("refused").to_string();
    assert!(e.contains("names 1 samples more than once"), "{}", e.len());
    // No sample has a longer key, and the error shows its beginning.
    let longer = "k".repeat(1 << 20);
    let e = rejection(column_of(key, &[&*longer], None).path(), &defaults());
    assert!(e.contains("is not a key") && e.len() < 400, "{}", e.len());
}

#[test]
fn a_column_of_lists_is_refused() {
    // A row of 10,000 values.
    let (defined, mut repeated) = (vec![1; 10_000], vec![1; 10_000]);
    repeated[0] = 0;
    let keys = vec!["a"; 10_000];
    let file = column_of("REPEATED BYTE_ARRAY key (UTF8);", &keys, Some((&defined[..], &repeated[..])));
    assert!(file.as_file().metadata().expect("length").len() < 2000, "a dictionary of one value");
    assert!(rejection(file.path(), &defaults()).contains("the column key has lists or groups"));
}

/// A file with the key `a`. The header of a page claims what takes 2 GiB and 64 GiB: the process ended.
#[test]
fn a_file_cannot_claim_more_than_its_pages_hold() {
    const GOOD: &str = "\
        504152311504150a150a4c15021500000001000000611500150615062c15021510150615060000010200150219\
        2c48016d150200150c250018036b65792500001602191c191c26081c150c192500101918036b65791500160216\
        4c164c262c26080000164c160200003f00000050415231";
    const PAGE: &str = "\
        50415231150015feffffff0f15102c15021510150615060000ffffffff070000001502192c48016d150200150c\
        250018036b65792500001602191c191c26081c150c192500101918036b657915021602163a163a26080000163a\
        160200003d00000050415231";
    const DICTIONARY: &str = "\
        504152311504150a150a4c15feffffff0f1500000001000000611500150615062c150215101506150600000102\
        001502192c48016d150200150c250018036b65792500001602191c191c26081c150c192500101918036b657915\
        001602165416542634260800001654160200003f00000050415231";
    let file_of = |hex: &str| {
        let digits: Vec<u8> = hex.bytes().map(|c| char::from(c).to_digit(16).expect("hex") as u8).collect();
        let file = tempfile::NamedTempFile::new().expect("file");
        let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        std::fs::write(file.path(), bytes).expect("write");
        file
    };
    let good = Selection::read(file_of(GOOD).path(), &defaults()).expect("a selection");
    assert_eq!(good.base(None), PlanBase::Keys(vec!["a".to_owned()]));
    for bomb in [PAGE, DICTIONARY] {
        let why = rejection(file_of(bomb).path(), &defaults());
        assert!(why.contains("a page of") && why.contains("claims"), "{why}");
    }
}
