// SPDX-License-Identifier: Apache-2.0

package function_test

import (
	"encoding/json"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestID(t *testing.T) {
	for _, tt := range []struct {
		id         function.ID
		text, name string
	}{
		{function.ID{Address: "0000:3b:02.1"}, "0000:3b:02.1", "0000-3b-02-1"},
		{function.SubfunctionID("0000:3b:00.0", 88), "0000:3b:00.0/sf88", "0000-3b-00-0-sf88"},
		{function.SubfunctionID("10000:e1:00.0", 0), "10000:e1:00.0/sf0", "10000-e1-00-0-sf0"},
		{function.SubfunctionID("0000:3b:00.0", 1<<32-1), "0000:3b:00.0/sf4294967295",
			"0000-3b-00-0-sf4294967295"},
	} {
		if got := tt.id.String(); got != tt.text {
			t.Errorf("String() = %q, want %q", got, tt.text)
		}
		if got := tt.id.DeviceName(); got != tt.name {
			t.Errorf("%s: DeviceName() = %q, want %q", tt.text, got, tt.name)
		}
		if got, err := function.ParseID(tt.text); err != nil || got != tt.id {
			t.Errorf("ParseID(%q) = %v, %v", tt.text, got, err)
		}
		if got, err := function.ParseDeviceName(tt.name); err != nil || got != tt.id {
			t.Errorf("ParseDeviceName(%q) = %v, %v", tt.name, got, err)
		}
	}
}

func TestParseIDRefuses(t *testing.T) {
	for _, s := range []string{"", "/", "3b:02.1", "0000:3b:02.1/", "0000:3b:02.1/88",
		"0000:3b:02.1/sf", "0000:3b:02.1/sf-1",
		"0000:3b:02.1/sf+1", "0000:3b:02.1/sf01", "0000:3b:02.1/sf4294967296",
		"0000:3b:02.1/sf1/sf2", "0000-3b-02-1"} {
		if got, err := function.ParseID(s); err == nil || got != (function.ID{}) {
			t.Errorf("ParseID(%q) = %v, %v, want an error alone", s, got, err)
		}
	}
	for _, s := range []string{
		"", "-sf1", "0000-3b-02-1-sf", "0000-3b-02-1-sf01", "0000-3b-02-1-sfx", "0000:3b:02.1",
		"0000-3b-02-1-sf1-sf2",
	} {
		if got, err := function.ParseDeviceName(s); err == nil || got != (function.ID{}) {
			t.Errorf("ParseDeviceName(%q) = %v, %v, want an error alone", s, got, err)
		}
	}
}

func TestIDInJSON(t *testing.T) {
	type record struct{ Function function.ID }
	want := record{function.SubfunctionID("0000:3b:00.0", 7)}
	data, err := json.Marshal(want)
	if err != nil || string(data) != `{"Function":"0000:3b:00.0/sf7"}` {
		t.Fatalf("got %s, %v", data, err)
	}

	var got record
	if err := json.Unmarshal(data, &got); err != nil || got != want {
		t.Fatalf("read back %v, %v", got, err)
	}
}

func FuzzParseID(f *testing.F) {
	for _, s := range []string{
		"0000:3b:02.1", "0000:3b:00.0/sf88", "0000-3b-00-0-sf88", "0000:3B:00.0/sf007",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := function.ParseID(s); err == nil {
			if back, err := function.ParseID(id.String()); err != nil || back != id {
				t.Fatalf("ParseID(%q) = %v, which reads as %v, %v", s, id, back, err)
			}
			if back, err := function.ParseDeviceName(id.DeviceName()); err != nil || back != id {
				t.Fatalf("%v: device name %q reads as %v, %v", id, id.DeviceName(), back, err)
			}
		}
		if id, err := function.ParseDeviceName(s); err == nil && id.DeviceName() != s {
			t.Fatalf("ParseDeviceName(%q) = %v, whose name is %q", s, id, id.DeviceName())
		}
	})
}
