// SPDX-License-Identifier: Apache-2.0

package initramfs

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// libraries is the directory of shared libraries, in the root and in the guest.
const libraries = "/usr/lib/x86_64-linux-gnu"

// Program adds a program, with its dynamic linker and shared libraries. They come from root, the
// directory of an unpacked Debian system. A static program needs no libraries.
func (a *Archive) Program(name, file, root string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}

	a.File(name, content, 0o755)
	needed, err := dependencies(content)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}

	for _, library := range needed {
		if a.has(library) {
			continue
		}

		err := a.Program(library, filepath.Join(root, library), root)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s needs %s, which is not in %s", file, library, root)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// dependencies returns the paths of a program's dynamic linker and libraries.
func dependencies(content []byte) ([]string, error) {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}

	names, err := file.ImportedLibraries()
	if err != nil {
		return nil, err
	}

	var paths []string
	for _, segment := range file.Progs {
		if segment.Type != elf.PT_INTERP {
			continue
		}

		interpreter := make([]byte, segment.Filesz)
		if _, err := segment.ReadAt(interpreter, 0); err != nil {
			return nil, fmt.Errorf("dynamic linker: %w", err)
		}
		// the interpreter is "/lib64/ld-linux-x86-64.so.2", and /lib64 is a link to usr/lib64
		paths = append(paths, "/usr"+strings.TrimRight(string(interpreter), "\x00"))
	}

	for _, name := range names {
		if !strings.HasPrefix(name, "ld-linux") {
			paths = append(paths, filepath.Join(libraries, name))
		}
	}

	return paths, nil
}
