package main

import (
	"bytes"
	"fmt"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// quirksPage lists what single drivers do.
func quirksPage() []byte {
	var page bytes.Buffer
	page.WriteString(`# Quirks of drivers

<!-- Made by docs/gen from pkg/kernel/quirk. Do not edit. -->

What single drivers do otherwise than the rest, and what this project does about it. Which card shows it is in
[hardware.md](hardware.md), in the row that is named.

| driver | quirk | what it does | what is done about it | source in the kernel | row |
| --- | --- | --- | --- | --- | --- |
`)
	for _, q := range quirk.All() {
		fmt.Fprintf(&page, "| %s | %s | %s | %s | %s | %s |\n", q.Driver, q.Name, q.Does, q.Answer, q.Source, q.Row)
	}
	return page.Bytes()
}
